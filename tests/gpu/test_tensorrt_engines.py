"""TensorRT engines, built for the GPU of this machine from the small checkpoint, beside float32 torch.

Skipped, with the reason, where there is no GPU, no TensorRT, or a GPU that the installed TensorRT does not
support. They have not been run yet: no machine with a supported GPU was at hand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.engine.base import TextEngine, VisionEngine
from tessera.engine.batch import PackedInput, TextBatch, pack
from tessera.engine.factory import make_text_engine, make_vision_engine
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.errors import ConfigError, EngineBuildFailed
from tessera.models.base import sequential
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera.rows import Rows
from tessera_engines.compiled.build import build_engine
from tessera_engines.compiled.spec import BuildSpec, Layout, Profile, Range, Stage
from tests.engine.packed_images import computed, of_units

pytestmark = pytest.mark.gpu

TOKENS, UNITS = 4096, 12
TEXT_PROFILES = (
    Profile(sequences=Range(1, 16, 64), tokens=Range(1, 64, 256), rows=Range(1, 256, 16384)),
    Profile(sequences=Range(1, 2, 4), tokens=Range(1, 1024, 10240), rows=Range(1, 256, 40960)),
)
VISION_PROFILES = (Profile(units=Range(1, 1, 4)), Profile(units=Range(1, 8, 12)))
DTYPES = ["bfloat16", "float16"]
LEAST = 0.999


def flavour() -> str:
    for name, module in (("tensorrt", "tensorrt"), ("tensorrt_rtx", "tensorrt_rtx_bindings")):
        try:
            __import__(module)
        except ImportError:
            continue
        return name
    pytest.skip("needs tensorrt or tensorrt_rtx")


def built(
    model: LlamaNemotronVL,
    folder: Path,
    stage: Stage,
    dtype: str,
    profiles: tuple[Profile, ...],
    layout: Layout = Layout.PADDED,
) -> Path:
    major, minor = torch.cuda.get_device_capability()
    spec = BuildSpec(
        stage=stage,
        flavour=flavour(),
        dtype=dtype,
        layout=layout,
        capabilities=(f"{major}.{minor}",),
        profiles=profiles,
    )
    try:
        build_engine(model, spec, folder / stage, progress=lambda what: None)
    except (ConfigError, EngineBuildFailed) as error:
        if isinstance(error, EngineBuildFailed) and layout is Layout.PADDED:
            raise
        pytest.skip(f"{torch.cuda.get_device_name()}: {error}")
    return folder / stage


@pytest.fixture(scope="module", params=[(dtype, layout) for layout in Layout for dtype in DTYPES], ids=str)
def text_path(
    request: pytest.FixtureRequest, model: LlamaNemotronVL, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """An engine and its type; packed ones are skipped where no kernel takes packed attention."""
    dtype, layout = request.param
    folder = tmp_path_factory.mktemp("engines")
    return built(model, folder, Stage.TEXT, dtype, TEXT_PROFILES, layout), dtype


@pytest.fixture(scope="module", params=DTYPES)
def vision_path(
    request: pytest.FixtureRequest, model: LlamaNemotronVL, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("engines")
    return built(model, folder, Stage.VISION, request.param, VISION_PROFILES), request.param


def config(path: Path, dtype: str, cost: int, graphs: int | None) -> EngineSettings:
    return EngineSettings(
        engine="tensorrt",
        path=path,
        dtype=dtype,
        device="cuda",
        max_batch_cost=cost,
        max_queue_cost=cost,
        graph_cost=graphs,
    )


@pytest.fixture(scope="module", params=[None, 0], ids=["graphs", "plain"])
def text(request: pytest.FixtureRequest, model: LlamaNemotronVL, text_path: tuple[Path, str]) -> TextEngine:
    chosen = config(*text_path, TOKENS, request.param)
    engine = make_text_engine(model, chosen, place(chosen))
    engine.warm()
    return engine


@pytest.fixture(scope="module", params=[None, 0], ids=["graphs", "plain"])
def vision(
    request: pytest.FixtureRequest, model: LlamaNemotronVL, vision_path: tuple[Path, str]
) -> VisionEngine:
    chosen = config(*vision_path, UNITS, request.param)
    engine = make_vision_engine(model, chosen, place(chosen))
    engine.warm()
    return engine


CPU = EngineSettings(device="cpu", dtype="float32", max_batch_cost=TOKENS, max_queue_cost=TOKENS)


def inputs(model: LlamaNemotronVL, lengths: Sequence[int], images: Sequence[int] = ()) -> list[PackedInput]:
    chance = np.random.default_rng(sum(lengths))
    found = []
    for number, length in enumerate(lengths):
        count = model.vision.rows(1) if number in images else 0
        rows = torch.from_numpy(chance.standard_normal((count, model.vision.row_width), dtype=np.float32))
        found.append(
            PackedInput(
                tokens=chance.integers(0, model.vocab_size // 2, length, dtype=np.int32),
                positions=sequential(length),
                vision=(rows * 0.02,) if count else (),
                vision_index=np.arange(1, count + 1, dtype=np.int32),
            )
        )
    return found


def expected_text(model: LlamaNemotronVL, sequences: list[PackedInput]) -> Rows:
    return make_text_engine(model, CPU, place(CPU)).launch(pack(sequences)).result()


def worst_cosine(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.cosine_similarity(found.double().cpu(), expected.double().cpu(), dim=-1).min())


def agree(found: Rows, expected: Rows) -> None:
    assert worst_cosine(torch.from_numpy(found.values), torch.from_numpy(expected.values)) > LEAST
    np.testing.assert_allclose(found.norms, expected.norms, rtol=0.02)


@pytest.mark.parametrize(
    ("lengths", "images"),
    [
        ([1], []),
        ([700], [0]),
        ([300, 1, 280, 64, 33], [0, 2]),
        ([2] * 70, []),
        ([9000, 4, 1], []),
        ([1200] * 6, [0, 3, 5]),
    ],
    ids=str,
)
def test_text_agrees_row_by_row(
    text: TextEngine, model: LlamaNemotronVL, lengths: list[int], images: list[int]
) -> None:
    sequences = inputs(model, lengths, images)
    agree(text.launch(pack(sequences)).result(), expected_text(model, sequences))


def test_replays_see_the_lengths_of_their_own_batch(text: TextEngine, model: LlamaNemotronVL) -> None:
    """All of them are rounded up to four sequences of 64 tokens, and so replay one graph."""
    batches = [inputs(model, lengths) for lengths in ([64, 3, 17, 40], [1, 1, 1, 64], [33, 64, 9, 2])]
    launched = [text.launch(pack(sequences)) for sequences in batches[:2]]
    for sequences, one in zip(batches, [*launched, text.launch(pack(batches[2]))], strict=True):
        agree(one.result(), expected_text(model, sequences))


@pytest.mark.parametrize("counts", [[1], [3], [4, 1], [7, 2, 3], [9, 9, 9]], ids=str)
def test_vision_rows_agree_and_stay_in_their_slots(
    vision: VisionEngine, model: LlamaNemotronVL, vision_path: tuple[Path, str], counts: list[int]
) -> None:
    batch = of_units(model, counts)
    size, dtype = model.vision.rows(1), getattr(torch, vision_path[1])
    slab = torch.full((40 * size, model.vision.row_width), 7.0, dtype=dtype, device="cuda")
    bounds = np.cumsum([1, *counts]) * size
    torch.cuda.synchronize()
    out = [slab[start:end] for start, end in pairwise(bounds)]
    vision.launch(batch, out).result()
    found = slab[bounds[0] : bounds[-1]].float()
    assert worst_cosine(found, computed(model, batch)) > LEAST
    assert bool((slab[: bounds[0]] == 7).all()) and bool((slab[bounds[-1] :] == 7).all())


def tokens_per_second(engine: TextEngine, batch: TextBatch) -> float:
    for _ in range(3):
        engine.launch(batch).result()
    started, times = time.perf_counter(), 20
    for _ in range(times):
        engine.launch(batch).result()
    return len(batch.input_ids) * times / (time.perf_counter() - started)


def test_speed_beside_torch_at_equal_results(
    text: TextEngine, model: LlamaNemotronVL, text_path: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints tokens per second; what fails is a difference between the two engines on the same batch."""
    chosen = EngineSettings(dtype=text_path[1], device="cuda", max_batch_cost=TOKENS, max_queue_cost=TOKENS)
    torch_engine = make_text_engine(model, chosen, place(chosen))
    torch_engine.warm()
    for lengths in ([16] * 8, [128] * 16, [1024] * 4):
        batch = pack(inputs(model, lengths))
        agree(text.launch(batch).result(), torch_engine.launch(batch).result())
        rates = [tokens_per_second(engine, batch) for engine in (text, torch_engine)]
        with capsys.disabled():
            print(f"\n{lengths[0]} x {len(lengths)}: TensorRT {rates[0]:.0f}, torch {rates[1]:.0f} tokens/s")


def test_an_engine_for_another_gpu_is_refused(model: LlamaNemotronVL, tmp_path: Path) -> None:
    name = flavour()
    if name != "tensorrt_rtx":
        pytest.skip("only tensorrt_rtx builds for other GPUs")
    other = "8.6" if torch.cuda.get_device_capability() != (8, 6) else "8.9"
    spec = BuildSpec(stage=Stage.VISION, flavour=name, capabilities=(other,), profiles=VISION_PROFILES)
    build_engine(model, spec, tmp_path / "engine", progress=lambda what: None)
    chosen = config(tmp_path / "engine", "bfloat16", UNITS, None)
    with pytest.raises(ConfigError, match=f"it was built for {other}, this machine has"):
        make_vision_engine(model, chosen, place(chosen))
