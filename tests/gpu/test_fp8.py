"""Products in FP8 on the card beside the same arithmetic by plain torch in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, rms_norm, silu

from tessera.checkpoint.loading import as_stored
from tessera.engine.factory import make_text_engine, make_vision_engine, rounding
from tessera.engine.placement import place
from tessera.engine.quantization import resolved
from tessera.engine.settings import EngineSettings
from tessera.models import open_model
from tessera.models.base import Model, Pixels
from tessera.nn.forms.plain import activation_function
from tessera.nn.fp8 import LARGEST, Fp8Weight, rounded, row_scales, values_of
from tessera.nn.kernels import gemm, hopper
from tessera_engines.cli import main
from tests.checkpoint.modelopt import quantise
from tests.engine.packed_images import of_units, rows_for
from tests.models.running import Given, batch_of, cosines, vectors, vision_rows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

WIDTH = 1152
SCALES = [None, 0.01, 0.002]
TEXTS = ["a yellow heart", "two cats on a sofa", "the sum of the first ten primes " * 20, "x"]


@pytest.fixture(autouse=True)
def device() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a CUDA device of capability 8.9 or above")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


Kernel = Callable[[torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


def cases() -> dict[str, tuple[Kernel, torch.Tensor]]:
    """Each kernel, and in float32 what it gives before that is rounded."""
    from tessera.nn.kernels import fp8

    rows, wide, added = random(37, WIDTH), random(37, 2 * WIDTH, seed=1), random(37, WIDTH, seed=2)
    weight, bias = random(WIDTH, seed=3), random(WIDTH, seed=4)
    offset = random(WIDTH, seed=5).float()
    gate, up = wide.float().chunk(2, dim=1)
    both = rows + added
    return {
        "quantise": (lambda scale: fp8.quantise(rows, scale), rows.float()),
        "gelu": (lambda scale: fp8.gelu_tanh(rows, scale), gelu(rows.float(), approximate="tanh")),
        "gate": (lambda scale: fp8.silu_gate(wide, scale), silu(gate) * up),
        "rms": (
            lambda scale: fp8.add_rms_norm(rows.clone(), added, weight, 1e-6, scale),
            rms_norm(both.float(), (WIDTH,), weight.float(), 1e-6),
        ),
        "layer": (
            lambda scale: fp8.add_layer_norm(rows.clone(), added, offset, weight, bias, 1e-6, scale),
            layer_norm(both.float() + offset, (WIDTH,), weight.float(), bias.float(), 1e-6),
        ),
    }


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["quantise", "gelu", "gate", "rms", "layer"])
def test_kernels_round_as_the_reference_does(name: str, scale: float | None) -> None:
    """With the smallest scale some numbers lie beyond the type's, and become its largest."""
    kernel, expected = cases()[name]
    static = None if scale is None else torch.tensor(scale, device="cuda")
    values, scales = kernel(static)
    wanted = row_scales(expected) if static is None else static.expand(37, 1)
    torch.testing.assert_close(scales, wanted, rtol=1e-5, atol=0)
    found, reference = values.float() * scales, rounded(expected, static)
    off = (found - reference).abs()
    # A number near the middle of two may become the other one, a step away.
    assert (off <= 0.126 * reference.abs() + 2**-8 * wanted).all()
    assert float((off > 1e-5 * reference.abs()).float().mean()) < 0.01


@pytest.mark.parametrize("scale", [None, 0.01])
@pytest.mark.parametrize("total", [1, 5, 300])
def test_a_product_of_several_tensors_is_its_definition(total: int, scale: float | None) -> None:
    parts = [random(rows, WIDTH, seed=rows).float() * rows for rows in (128, 64, 64)]
    own = [part.abs().max() / 448 for part in parts]
    weight = Fp8Weight(
        values=torch.cat([values_of(part, one) for part, one in zip(parts, own, strict=True)]),
        scales=torch.cat([one.expand(len(part)) for part, one in zip(parts, own, strict=True)]),
        input_scale=None if scale is None else torch.tensor(scale, device="cuda"),
    )
    rows, bias = random(total, WIDTH, seed=9), random(256, seed=8)
    scales = row_scales(rows) if scale is None else torch.full((total, 1), scale, device="cuda")
    values = values_of(rows, scales)
    found = weight.product(values, scales, bias).double()
    expected = (values.double() * scales) @ weight.multiplied().double().t() + bias.double()
    # Hopper's sums of FP8 keep 14 bits of what they add where they are fast.
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2e-3 * float(expected.abs().max()))


@pytest.fixture
def quack() -> None:
    if not hopper.serves(hopper.QUACK, torch.device("cuda")):
        pytest.skip("needs quack-kernels and a Hopper GPU")


@pytest.mark.usefixtures("quack")
@pytest.mark.parametrize("total", [1, 300, 4096])
def test_a_gate_behind_a_product_is_its_definition(total: int) -> None:
    parts = [random(256, WIDTH, seed=1), 3 * random(256, WIDTH, seed=2)]
    weight = Fp8Weight.of(torch.cat(parts) / WIDTH**0.5)
    rows = random(total, WIDTH)
    scales = row_scales(rows)
    values = values_of(rows, scales)
    found = gemm.gated_fp8(values, scales, weight).double()
    both = (values.double() * scales) @ weight.multiplied().double().t()
    first, second = both.chunk(2, dim=1)
    expected = silu(first) * second
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=4e-3 * float(expected.abs().max()))


@pytest.mark.usefixtures("quack")
@pytest.mark.parametrize("scale", [None, 0.02, 0.01])
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "quick_gelu"])
@pytest.mark.parametrize("total", [1, 300, 4096])
def test_an_activation_behind_a_product_is_its_definition(
    total: int, activation: str, scale: float | None
) -> None:
    weight = Fp8Weight.of(random(512, WIDTH, seed=1) / WIDTH**0.5)
    rows, bias = random(total, WIDTH), random(512, seed=2).float()
    scales = row_scales(rows)
    values = values_of(rows, scales)
    given = None if scale is None else torch.tensor(scale, device="cuda")
    found = gemm.activated_fp8(values, scales, weight, bias, activation, given)
    whole = (values.double() * scales) @ weight.multiplied().double().t() + bias.double()
    expected = activation_function(activation)(whole)
    # What fast sums lose, and three bits behind the first of e4m3, whose smallest steps are 2**-9.
    lost, error, least = 4e-3 * float(whole.abs().max()), 2**-6, 0.0
    if scale is not None:
        expected = (expected / scale).clamp(-LARGEST, LARGEST)
        lost, error, least = lost / scale, 2**-3, 2**-9
    torch.testing.assert_close(found.double(), expected, rtol=error, atol=least + lost)


@pytest.fixture(scope="module", params=["all", "some", "rows"])
def eight(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Model:
    out = tmp_path_factory.mktemp("models") / "eight"
    without = ("layers.0.self_attn.o_proj", "layers.1.mlp.down_proj", "layers.1.self_attn.q_proj")
    if request.param != "some":
        without = ()
    return open_model(quantise(checkpoint, out, static=request.param != "rows", without=without))


def text_settings(quantization: str) -> EngineSettings:
    return EngineSettings(max_batch_cost=8192, max_queue_cost=8192, quantization=quantization)


@pytest.mark.parametrize("times", [1, 40], ids=["few", "from 4096 tokens on"])
def test_an_engine_holds_what_is_stored_and_computes_as_the_reference(eight: Model, times: int) -> None:
    chosen = resolved(eight, "text", text_settings("auto"), place(text_settings("auto")))
    assert chosen.quantization == "stored" and rounding(chosen) == "fp8 as stored"
    engine = make_text_engine(eight, chosen, place(chosen))
    engine.warm()
    batch = batch_of(eight, None, [Given(parts=(text,)) for text in TEXTS] * times)
    assert (len(batch.input_ids) >= gemm.LEAST_ROWS) == (times > 1)
    with as_stored():
        reference = eight.load_text(dtype="float32", device="cpu")
    expected = vectors(eight, reference, batch)
    for _ in range(2):  # the second is a replay
        found = engine.launch(batch).result().values
        print(f"worst cosine {cosines(found, expected).min():.6f}")
        # 0.9972 at worst on an H200: what a card adds keeps 14 bits, and these weights are random.
        assert cosines(found, expected).min() > 0.996
    engine.close()
    whole = make_text_engine(eight, text_settings("none"), place(text_settings("none")))
    whole.warm()
    multiplied = whole.launch(batch).result().values
    whole.close()
    own = vectors(eight, eight.load_text(dtype="float32", device="cpu"), batch)
    assert cosines(multiplied, own).min() > 0.998
    assert cosines(found, multiplied).min() < 0.99999, "inputs were rounded, too"


def test_weights_stay_in_eight_bits(checkpoint: Path, eight: Model) -> None:
    taken: dict[str, int] = {}
    for name, how in (("none", False), ("stored", True)):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        if how:
            with as_stored():
                module: Any = eight.load_text(dtype="bfloat16", device="cuda")
        else:
            module = eight.load_text(dtype="bfloat16", device="cuda")
        taken[name] = torch.cuda.memory_allocated() - before
        held = [one for layer in module.layers.layers for one in layer.linears if one.fp8 is not None]
        assert bool(held) == how
        saved = sum(one.fp8.values.numel() - 4 * len(one.fp8.scales) for one in held)
        del module, held
    # Blocks of the allocator are of 512 bytes.
    assert taken["none"] - taken["stored"] == pytest.approx(saved, abs=512 * 200)


def test_both_towers_that_were_quantized_here(
    checkpoint: Path, photos: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "calibration"
    folder.mkdir()
    (folder / "texts.txt").write_text("\n".join(TEXTS))
    (folder / "flower.jpg").write_bytes(photos["flower"])
    words = ["--model-path", str(checkpoint), "--calibration", str(folder), "--out", str(tmp_path / "out")]
    main(["quantize", *words, "--stage", "all", "--most-loss", "1"])
    model = open_model(tmp_path / "out")
    assert model.vision is not None
    settings = EngineSettings(max_batch_cost=12, max_queue_cost=12)
    engine = make_vision_engine(model, settings, place(settings))
    engine.warm()
    with as_stored():
        reference = model.load_vision(dtype="float32", device="cpu")
    batch = of_units(model, [1, 3, 2])
    out = rows_for(model, batch, dtype=torch.bfloat16, device="cuda")
    engine.launch(batch, out).result()
    found = torch.cat(out).float().cpu().numpy()
    images = [
        Pixels(values=values, plan=plan) for values, plan in zip(batch.pixels, batch.plans, strict=True)
    ]
    expected = torch.cat(vision_rows(model, reference, images)).float().numpy()
    print(f"worst cosine of rows {cosines(found, expected).min():.6f}")
    assert cosines(found, expected).min() > 0.995
    engine.close()
