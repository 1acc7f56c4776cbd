"""The torch engines, and the same compiled ahead of time by AOTInductor, beside float32 on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import tessera
from tessera.engine.base import TextEngine, VisionEngine
from tessera.engine.batch import PackedInput, pack, tensors
from tessera.engine.factory import make_text_engine, make_vision_engine
from tessera.engine.placement import Placement, place
from tessera.engine.settings import EngineSettings
from tessera.engine.streams import HostCopies
from tessera.models.base import sequential
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera_engines.compiled.build import build_engine
from tessera_engines.compiled.spec import BuildSpec, Layout, Profile, Range, Stage
from tests.engine.packed_images import computed, of_units, rows_for
from tests.gpu.waiting import no_waiting

# The first test of each stage waits for the compiler.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TOKENS, UNITS = 4096, 12


def config(cost: int, graphs: int | None, path: Path | None = None) -> EngineSettings:
    kind = "torch" if path is None else "aoti"
    return EngineSettings(engine=kind, path=path, max_batch_cost=cost, max_queue_cost=cost, graph_cost=graphs)


PROFILES = {
    Stage.TEXT: Profile(sequences=Range(1, 16, 64), tokens=Range(1, 1024, 16384), rows=Range(1, 256, 16384)),
    Stage.VISION: Profile(units=Range(1, 4, UNITS)),
}


def spec_of(stage: Stage) -> BuildSpec:
    layout = Layout.PACKED if stage is Stage.TEXT else Layout.PADDED
    return BuildSpec(
        stage=stage, flavour="aoti", dtype="bfloat16", layout=layout, profiles=(PROFILES[stage],)
    )


@pytest.fixture(scope="module")
def built(
    model: LlamaNemotronVL, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Stage], Path | None]:
    """The directory of a stage's engine, for kinds that have one; built when it is first asked for."""
    folder = tmp_path_factory.mktemp("engines")

    def path_of(kind: str, stage: Stage) -> Path | None:
        if kind == "torch":
            return None
        path = folder / stage
        if not path.exists():
            build_engine(model, spec_of(stage), path, progress=print)
        return path

    return path_of


KINDS = [("torch", None), ("torch", 0), ("aoti", None), ("aoti", 0)]
KIND_NAMES = ["torch, graphs", "torch, plain", "aoti, graphs", "aoti, plain"]


@pytest.fixture(scope="module", params=KINDS, ids=KIND_NAMES)
def text(
    request: pytest.FixtureRequest, model: LlamaNemotronVL, built: Callable[[str, Stage], Path | None]
) -> TextEngine:
    kind, graphs = request.param
    chosen = config(TOKENS, graphs, built(kind, Stage.TEXT))
    engine = make_text_engine(model, chosen, place(chosen))
    engine.warm()
    return engine


@pytest.fixture(scope="module", params=KINDS, ids=KIND_NAMES)
def vision(
    request: pytest.FixtureRequest, model: LlamaNemotronVL, built: Callable[[str, Stage], Path | None]
) -> VisionEngine:
    kind, graphs = request.param
    chosen = config(UNITS, graphs, built(kind, Stage.VISION))
    engine = make_vision_engine(model, chosen, place(chosen))
    engine.warm()
    return engine


@pytest.fixture(scope="module")
def placement(model: LlamaNemotronVL) -> Placement:
    return place(config(1, None))


def inputs(
    model: LlamaNemotronVL, lengths: list[int], rows: torch.Tensor | None = None, seed: int = 0
) -> list[PackedInput]:
    random = np.random.default_rng(seed)
    count = 0 if rows is None else len(rows)
    return [
        PackedInput(
            tokens=random.integers(0, model.vocab_size // 2, length, dtype=np.int32),
            positions=sequential(length),
            vision=() if rows is None else (rows,),
            vision_index=np.arange(1, count + 1, dtype=np.int32),
        )
        for length in lengths
    ]


def expected_vectors(model: LlamaNemotronVL, sequences: list[PackedInput]) -> torch.Tensor:
    batch = pack(sequences)
    rows = (
        torch.cat([row.float().cpu() for row in batch.vision])
        if batch.vision
        else torch.empty(0, model.vision.row_width)
    )
    with torch.inference_mode():
        return model.load_text(dtype="float32", device="cpu")(tensors(batch, rows))


def check_text(engine: TextEngine, model: LlamaNemotronVL, sequences: list[PackedInput]) -> None:
    """Unit vectors in the right direction, and the norms that pooling gave them."""
    found, expected = engine.launch(pack(sequences)).result(), expected_vectors(model, sequences)
    assert worst_cosine(torch.from_numpy(found.values), expected) > 0.999
    np.testing.assert_allclose(np.linalg.norm(found.values, axis=1), 1.0, atol=1e-4)
    np.testing.assert_allclose(found.norms, expected.norm(dim=-1), rtol=0.02)


def worst_cosine(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.cosine_similarity(found.double().cpu(), expected.double().cpu(), dim=-1).min())


@pytest.mark.parametrize(
    "lengths", [[1], [5], [700], [1, 7, 33, 64], [1000, 3, 1, 1200], [2] * 40, [9] * 16], ids=str
)
def test_text_agrees_with_float32(text: TextEngine, model: LlamaNemotronVL, lengths: list[int]) -> None:
    sequences = inputs(model, lengths)
    check_text(text, model, sequences)


@pytest.mark.parametrize("where", ["device", "pinned", "pageable", "mixed"])
def test_vision_rows_from_anywhere(
    text: TextEngine, model: LlamaNemotronVL, placement: Placement, where: str
) -> None:
    rows = torch.randn(8, model.vision.row_width, generator=torch.Generator().manual_seed(0))
    rows = rows.to(torch.bfloat16) * 0.02
    places = {
        "device": [rows.cuda()],
        "pinned": [rows.pin_memory()],
        "pageable": [rows],
        "mixed": [rows.cuda(), rows.pin_memory(), rows],
    }[where]
    sequences = [inputs(model, [12], place, seed)[0] for seed, place in enumerate(places)]
    check_text(text, model, sequences)


@pytest.mark.parametrize("count", [1, 3, 8, 9, 12])
def test_vision_agrees_with_float32(vision: VisionEngine, model: LlamaNemotronVL, count: int) -> None:
    batch = of_units(model, [1] * count)
    parts = rows_for(model, batch, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    vision.launch(batch, parts).result()
    assert worst_cosine(torch.cat(parts).float(), computed(model, batch)) > 0.999


def test_nothing_waits_for_the_device(text: TextEngine, vision: VisionEngine, model: LlamaNemotronVL) -> None:
    batch = of_units(model, [2])
    out = rows_for(model, batch, dtype=torch.bfloat16, device="cuda")
    with no_waiting():
        launched = [vision.launch(batch, out), text.launch(pack(inputs(model, [9, 400, 2])))]
        launched += [vision.launch(batch, out), text.launch(pack(inputs(model, [900, 400, 2])))]
    for one in launched:
        one.result()


def test_nothing_is_compiled_after_the_warm_up(
    text: TextEngine, model: LlamaNemotronVL, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a kernel was compiled after the warm-up")

    monkeypatch.setattr(triton.runtime.jit, "compile", fail, raising=False)
    monkeypatch.setattr(triton.compiler, "compile", fail)
    for lengths in ([1], [3, 5], [17] * 7, [513], [1, 600, 31], [4096], [77] * 50):
        text.launch(pack(inputs(model, lengths))).result()


# An engine of this process would not compile what the process has compiled before.
_BUILD = """
import sys
from pathlib import Path
import msgspec
from tessera_engines.compiled.build import build_engine
from tessera_engines.compiled.spec import BuildSpec
from tessera.models import open_model

checkpoint, path, spec = sys.argv[1:]
build_engine(open_model(checkpoint), msgspec.json.decode(spec, type=BuildSpec), Path(path), progress=print)
"""
_START = """
import sys
from pathlib import Path
from tessera.engine.settings import EngineSettings
from tessera.engine.factory import make_text_engine, make_vision_engine
from tessera.engine.placement import place
from tessera.models import open_model

checkpoint, path, stage, cost = sys.argv[1:]
config = EngineSettings(engine="aoti", path=Path(path), max_batch_cost=int(cost), max_queue_cost=int(cost))
make = make_text_engine if stage == "text" else make_vision_engine
engine = make(open_model(checkpoint), config, place(config))
engine.warm()
mapped = [line.rstrip() for line in open("/proc/self/maps") if "/aotinductor/model/" in line]
assert mapped and all(line.endswith(" (deleted)") for line in mapped), mapped
"""


@pytest.mark.parametrize(("stage", "cost"), [(Stage.TEXT, TOKENS), (Stage.VISION, UNITS)])
def test_an_engine_brings_the_products_that_it_calls(
    checkpoint: Path, model: LlamaNemotronVL, tmp_path: Path, stage: Stage, cost: int
) -> None:
    def run(place: str, script: str, *arguments: str) -> set[str]:
        kernels = tmp_path / f"kernels in {place}"
        package = tmp_path / place / "tessera"
        package.parent.mkdir()
        package.symlink_to(Path(tessera.__path__[0]), target_is_directory=True)
        environment = os.environ | {"QUACK_CACHE_DIR": str(kernels), "PYTHONPATH": str(package.parent)}
        subprocess.run(
            [sys.executable, "-c", script, str(checkpoint), *arguments],
            env=environment,
            check=True,
            timeout=300,
        )
        return {file.name for file in kernels.rglob("*.o")}

    path = tmp_path / "engine"
    run("checkout", _BUILD, str(path), msgspec.json.encode(spec_of(stage)).decode())
    brought = {file.name for file in (path / "products").rglob("*.o")}
    # The library names kernels otherwise for what lies there.
    assert run("site-packages", _START, str(path), stage.value, str(cost)) == brought
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert bool(brought) == (hopper and importlib.util.find_spec("quack") is not None)


async def test_host_copies_are_pinned_and_equal(model: LlamaNemotronVL) -> None:
    copies = HostCopies()
    rows = torch.randn(300, model.vision.row_width, device="cuda")
    torch.cuda.synchronize()
    found = await copies.copy(rows)
    assert found.is_pinned()
    assert torch.equal(found, rows.cpu())
    assert await copies.copy(found) is found
    copies.close()
