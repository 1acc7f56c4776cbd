"""``tessera engine quantize``: its scales, the layers that it leaves out, and the files that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tessera.checkpoint.loading import as_stored
from tessera.models import open_model
from tessera.models.base import Content, PairLimits, PairModel, Pairs, Prompt, Role
from tessera.nn.fp8 import Fp8Weight, rounded
from tessera.nn.layer import Linear
from tessera_engines.calibration import Calibration
from tessera_engines.cli import main
from tessera_engines.quantize.checkpoint import excludes, left_out
from tessera_engines.quantize.inputs import Inputs
from tessera_engines.quantize.tower import Seen, chosen, loss_of
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import M3_TINY, TINY
from tessera_tools.random_checkpoint.qwen3 import VL_RERANK_TINY
from tests.models.adapting import linked
from tests.models.declaring import nest
from tests.models.running import Given, batch_of, cosines, vectors

TEXTS = ["two cats on a sofa", "the sum of the first ten primes", "a page about nothing at all", "x"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, photos: dict[str, bytes]) -> Path:
    folder = tmp_path_factory.mktemp("calibration")
    (folder / "texts.txt").write_text("\n".join([*TEXTS, ""]))
    (folder / "flower.jpg").write_bytes(photos["flower"])
    return folder


def run(checkpoint: Path, source: Path, out: Path, *more: str) -> Path:
    words = ["--model-path", str(checkpoint), "--calibration", str(source), "--out", str(out)]
    main(["quantize", *words, *more])
    return out


@pytest.fixture(scope="module")
def eight(checkpoint: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "model"
    return run(checkpoint, source, out, "--stage", "all", "--most-loss", "1")


def test_it_writes_what_modelopt_writes(checkpoint: Path, eight: Path) -> None:
    plain, stored = load_file(checkpoint / "model.safetensors"), load_file(eight / "model.safetensors")
    assert plain.keys() <= stored.keys()
    quantized = [name for name, value in stored.items() if value.dtype == torch.float8_e4m3fn]
    assert {name for name in stored if name not in plain} == {
        name.replace(".weight", end) for name in quantized for end in (".weight_scale", ".input_scale")
    }
    for name in quantized:
        scale = stored[f"{name}_scale"]
        assert scale.shape == () and scale.dtype == torch.float32
        # Half of the largest step of the type, and of the last step of half precision.
        off = (stored[name].float() * scale - plain[name].float()).abs()
        assert float((off / (plain[name].float().abs() + 4 * scale)).max()) < 0.07
    for name in plain:
        assert name in quantized or torch.equal(plain[name], stored[name])
    q, k, v = (
        next(stored[name] for name in stored if name.endswith(f"1.self_attn.{part}_proj.weight_scale"))
        for part in "qkv"
    )
    assert q == k == v, "one product, which vLLM runs with one scale"
    config = json.loads((eight / "config.json").read_text())
    about = json.loads((eight / "hf_quant_config.json").read_text())["quantization"]
    assert config["quantization_config"]["quant_method"] == "modelopt"
    assert config["quantization_config"]["quant_algo"] == about["quant_algo"] == "FP8"
    ignored = about["exclude_modules"]
    assert config["quantization_config"]["ignore"] == ignored
    modules = {name.removesuffix(".weight") for name in quantized}
    for name, value in plain.items():
        module = name.removesuffix(".weight")
        if value.ndim == 2 and name.endswith(".weight"):
            assert any(excludes(entry, module) for entry in ignored) == (module not in modules), name
    # vLLM makes a head for a decoder whose checkpoint has none, and ends where it is to be in FP8.
    for made in ("lm_head", "language_model.lm_head"):
        assert any(excludes(entry, made) for entry in ignored), made
    others = {path.name for path in checkpoint.iterdir()} - {"config.json", "model.safetensors"}
    assert all((eight / name).read_bytes() == (checkpoint / name).read_bytes() for name in others)


def test_its_vectors_are_near_and_both_readings_are_of_its_numbers(
    checkpoint: Path, eight: Path, photos: dict[str, bytes]
) -> None:
    inputs = [Given(parts=(text,)) for text in TEXTS] + [Given(parts=(photos["flower"],))]
    found = []
    for path, stored in ((checkpoint, False), (eight, False), (eight, True)):
        model = open_model(path)
        if stored:
            with as_stored():
                vision, text = (
                    load(dtype="float32", device="cpu") for load in (model.load_vision, model.load_text)
                )
            assert all(linear.fp8 for layer in text.layers.layers for linear in layer.linears)  # type: ignore[attr-defined]
            assert all(linear.fp8 for layer in vision.vision.layers.layers for linear in layer.linears)  # type: ignore[attr-defined]
        else:
            vision, text = (
                load(dtype="float32", device="cpu") for load in (model.load_vision, model.load_text)
            )
        found.append(vectors(model, text, batch_of(model, vision, inputs)))
    plain, multiplied, products = found
    # Random weights, whose errors do not cancel.
    assert cosines(multiplied, plain).min() > 0.98 and cosines(products, plain).min() > 0.95
    assert cosines(products, multiplied).min() < 0.999999


def test_layers_that_cost_too_much_stay_as_they_are(
    checkpoint: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(checkpoint, source, tmp_path / "all", "--most-loss", "1")
    said = capsys.readouterr().out
    losses = [float(line.split()[4].rstrip(",")) for line in said.splitlines() if " layer " in line]
    whole = float(said.split("loss ")[-1].split(" with")[0].split("; ")[1])
    worst = losses.index(max(losses))
    # A little less than all layers cost together.
    part = run(checkpoint, source, tmp_path / "part", "--most-loss", str(whole * 0.9))
    assert f"layer {worst}: loss {max(losses):.2g}, left as it is" in capsys.readouterr().out
    stored, fewer = load_file(out / "model.safetensors"), load_file(part / "model.safetensors")
    for name, value in stored.items():
        if value.dtype == torch.float8_e4m3fn:
            assert (fewer[name].dtype == value.dtype) != (f"layers.{worst}." in name), name


def test_heads_stay_beside_weights_that_torch_wrote(source: Path, tmp_path: Path) -> None:
    """As of bge-m3; what is written is safetensors."""
    plain, path = tmp_path / "plain", tmp_path / "path"
    write_checkpoint(plain, M3_TINY, seed=0)
    linked(plain, path, without="model.safetensors")
    torch.save(load_file(plain / "model.safetensors"), path / "pytorch_model.bin")
    (texts := tmp_path / "texts").mkdir()
    (texts / "texts.txt").symlink_to(source / "texts.txt")
    eight = run(plain, texts, tmp_path / "eight", "--most-loss", "1")
    again = run(path, texts, tmp_path / "again", "--most-loss", "1")
    assert {file.name for file in again.iterdir()} == {file.name for file in eight.iterdir()}
    for name in ("sparse_linear.pt", "colbert_linear.pt", "model.safetensors"):
        assert (again / name).read_bytes() == (eight / name).read_bytes()
    assert len(open_model(again).outputs) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--stage", "all"), "exists already"),
        (("--calibration", "nowhere"), "nowhere is no directory"),
        (("--most-loss", "0"), "--most-loss positive"),
        (("--most-loss", "1e-12"), "every layer costs more"),
    ],
)
def test_what_cannot_be_done_is_said_and_leaves_nothing(
    checkpoint: Path,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    out = tmp_path / "out"
    if "exists" in message:
        out.mkdir()
    with pytest.raises(SystemExit) as raised:
        run(checkpoint, source, out, *words)
    assert raised.value.code == 1 and message in capsys.readouterr().err
    assert not out.exists() or not list(out.iterdir())
    assert not [path for path in tmp_path.iterdir() if path != out]


def test_a_quantized_checkpoint_is_refused(
    eight: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(eight, source, tmp_path / "again", "--most-loss", "1")
    assert "is quantized already" in capsys.readouterr().err


def test_a_transformer_in_a_folder_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "checkpoint"
    write_checkpoint(path, TINY)
    with pytest.raises(SystemExit):
        run(nest(path), source, tmp_path / "out")
    assert "a transformer in a folder of its own, 0_Transformer, is not quantized" in capsys.readouterr().err


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "reranker"
    write_checkpoint(path, VL_RERANK_TINY)
    return path


def test_a_model_of_pairs_is_calibrated_with_pairs(reranker: Path, source: Path, tmp_path: Path) -> None:
    """Each line with the one before it as the query, and each image with a line."""
    model = open_model(reranker)
    assert isinstance(model, PairModel)
    inputs = Inputs.of(model, Calibration.read(source), 128)
    expected = []
    for number, text in enumerate(TEXTS):
        query, document = (Content(parts=(side,), role=Role.QUERY) for side in (TEXTS[number - 1], text))
        limits = PairLimits(tokens=512)
        (prompt,) = model.pairs(
            Pairs(query=query, documents=[document], limits=limits, param="query", params=["document"])
        )
        assert isinstance(prompt, Prompt)
        expected.append(prompt.tokens.tolist())
    found = [
        part.tolist() for batch in inputs.texts for part in np.split(batch.input_ids, batch.cu_seqlens[1:-1])
    ]
    assert sorted(found) == sorted(expected)
    out = run(reranker, source, tmp_path / "out", "--stage", "all", "--most-loss", "100")
    assert any(value.dtype == torch.float8_e4m3fn for value in load_file(out / "model.safetensors").values())


def test_images_of_a_model_of_pairs_need_a_query(
    reranker: Path, photos: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "flower.jpg").write_bytes(photos["flower"])
    with pytest.raises(SystemExit):
        run(reranker, tmp_path / "images", tmp_path / "out")
    assert "no line of text, a query for its images" in capsys.readouterr().err


def test_the_scale_is_that_with_the_least_loss() -> None:
    """One number far from all others: with a scale for it alone, all others are below the type's least."""
    torch.manual_seed(0)
    linear = Linear(32, 16, bias=False).requires_grad_(False)
    torch.nn.init.normal_(linear.weight)
    rows = torch.randn(256, 32) * 1e-5
    usual = chosen(linear, Seen(float(rows.abs().max()), [rows]))
    assert usual.input_scale is not None
    assert float(usual.input_scale) == pytest.approx(float(rows.abs().max()) / 448, rel=0.5)
    with torch.no_grad():
        linear.weight[:, 0] = 0
    rows[0, 0] = 1e6
    found = chosen(linear, Seen(1e6, [rows]))
    assert found.input_scale is not None and float(found.input_scale) < 1e6 / 448 / 1000

    def off(weight: Fp8Weight) -> float:
        return float(
            (rounded(rows, weight.input_scale) @ weight.multiplied().T - rows @ linear.weight.T).norm()
        )

    largest = Fp8Weight(values=found.values, scales=found.scales, input_scale=torch.tensor(1e6 / 448))
    assert off(found) < off(largest)


def test_losses_of_vectors_and_of_scores() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    assert loss_of(rows * 3, rows) == pytest.approx(0)
    assert loss_of(rows.flip(1), rows) == pytest.approx(1)
    scores = torch.tensor([[1.0], [3.0]])
    assert loss_of(scores + 1, scores) == pytest.approx(1 / 2**0.5)


def test_entries_spare_what_is_quantized() -> None:
    """Readers take an entry for a part of a name, too: ``layers.1`` would leave out layer 10 as well."""
    layers = [f"model.layers.{number}.mlp.down_proj" for number in range(12)]
    quantized = [name for name in layers if ".1." not in name]
    matrices = [*layers, "vision_model.blocks.1.fc", "vision_model.blocks.10.fc", "lm_head"]
    entries = left_out(matrices, quantized)
    assert "vision_model*" in entries and "lm_head" in entries
    for name in matrices:
        assert any(excludes(entry, name) for entry in entries) == (name not in quantized), name
