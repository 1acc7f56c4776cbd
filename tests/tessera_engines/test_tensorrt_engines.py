"""What the TensorRT engines do around TensorRT: cutting, laying out, binding, replaying, refusing.

TensorRT itself is a stand-in that computes the network's definition on the host; that TensorRT computes the
same is for the tests on a GPU to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tessera.engine.batch import PackedInput, TextBatch, pack
from tessera.engine.factory import make_text_engine, make_vision_engine
from tessera.engine.placement import Placement, place
from tessera.engine.settings import EngineSettings
from tessera.errors import ConfigError, EngineFailed, EngineMismatch
from tessera.models import open_model
from tessera.models.base import ImagePlan, Pixels, sequential
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera.rows import Rows
from tessera_engines.compiled.manifest import Binding, Manifest, file_entries
from tessera_engines.compiled.spec import BuildSpec, Layout, Profile, Range, Stage
from tessera_engines.tensorrt import loaded as tensorrt_loaded
from tessera_engines.tensorrt import text as tensorrt_text
from tessera_engines.tensorrt import vision as tensorrt_vision
from tessera_engines.tensorrt.build import fill_network, optimization_profile
from tessera_engines.tensorrt.loaded import LoadedEngine
from tessera_engines.tensorrt.module import logging_of
from tessera_engines.tensorrt.runs import Sizes
from tessera_engines.tensorrt.text import TextRuns, check_text_profiles
from tessera_engines.tensorrt.vision import VisionRuns, check_vision_profiles
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import CheckpointSpec
from tests.engine.packed_images import computed, of_units, packed, rows_for
from tests.families.grid import Grid
from tests.references.tensorrt_network import Network
from tests.tessera_engines.tensorrt_standin import HostStreams, StandInEngine

trt = pytest.importorskip("tensorrt_rtx_bindings", reason="needs tensorrt-rtx-cu13-bindings and its libs")

CPU = EngineSettings(device="cpu", dtype="float32", max_batch_cost=64, max_queue_cost=64)
PROFILES = (
    Profile(sequences=Range(1, 2, 8), tokens=Range(1, 16, 48), rows=Range(1, 16, 64), units=Range(1, 1, 2)),
    Profile(sequences=Range(1, 1, 2), tokens=Range(1, 64, 200), rows=Range(1, 16, 64), units=Range(1, 2, 4)),
)
PACKED_PROFILES = (
    Profile(sequences=Range(1, 2, 8), tokens=Range(1, 16, 96), rows=Range(1, 16, 64)),
    Profile(sequences=Range(1, 1, 2), tokens=Range(1, 64, 200), rows=Range(1, 16, 64)),
)


@pytest.fixture(autouse=True)
def host_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch aligns host memory to 64 bytes; device memory always to more than TensorRT wants."""
    monkeypatch.setattr(tensorrt_loaded, "ALIGNMENT", 64)
    monkeypatch.setattr(tensorrt_vision, "ALIGNMENT", 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaNemotronVL:
    path = tmp_path_factory.mktemp("models") / "model"
    write_checkpoint(path, CheckpointSpec(image_size=64, p_max_length=180, max_input_tiles=1))
    model = open_model(path)
    assert isinstance(model, LlamaNemotronVL)
    return model


class Loaded:
    """A stage of the model in the stand-in; ``loaded`` is what the engines are given."""

    def __init__(
        self, model: LlamaNemotronVL, stage: Stage, layout: Layout, profiles: tuple[Profile, ...] = PROFILES
    ) -> None:
        builder = trt.Builder(logging_of(trt)[0])
        definition = builder.create_network(0)
        spec = BuildSpec(
            stage=stage, flavour="tensorrt_rtx", dtype="float32", layout=layout, profiles=profiles
        )
        graph, _ = fill_network(trt, definition, model, spec)
        self.kept = (builder, graph)
        ranges = [
            {name: made.get_shape(name) for name in graph.inputs}
            for profile in profiles
            for made in [optimization_profile(builder, graph, profile)]
        ]
        self.manifest = manifest(model, spec, tuple(graph.bindings))
        self.engine = StandInEngine(trt, definition, Network(trt, definition, graph.weights), ranges)
        self.loaded = LoadedEngine(_WithoutCache(), self.engine, self.manifest, Path("engine"), "cpu")


class _WithoutCache:
    """The module, without what only TensorRT for RTX has."""

    def __getattr__(self, name: str) -> Any:
        if name == "IRuntimeCache":
            raise AttributeError(name)
        return getattr(trt, name)


def manifest(model: LlamaNemotronVL, spec: BuildSpec, bindings: tuple[Binding, ...] = ()) -> Manifest:
    return Manifest(
        stage=spec.stage,
        flavour=spec.flavour,
        layout=spec.layout,
        dtype=spec.dtype,
        family=model.family,
        fingerprint=model.fingerprint,
        width=model.output.width,
        row_width=model.vision.row_width,
        capabilities=("8.9",),
        versions={"tensorrt_rtx": str(trt.__version__)},
        profiles=spec.profiles,
        bindings=bindings,
        files={},
        build_seconds=0.0,
        built_at="",
    )


def sequences(
    model: LlamaNemotronVL, lengths: Sequence[int], images: Sequence[int] = ()
) -> list[PackedInput]:
    """Random tokens; the sequences whose numbers are in ``images`` hold one tile's rows from place 2 on."""
    chance = np.random.default_rng(sum(lengths))
    found = []
    for number, length in enumerate(lengths):
        count = model.vision.rows(1) if number in images else 0
        rows = torch.from_numpy(chance.standard_normal((count, model.vision.row_width), dtype=np.float32))
        found.append(
            PackedInput(
                tokens=chance.integers(0, model.vocab_size, length, dtype=np.int32),
                positions=sequential(length),
                vision=(rows,) if count else (),
                vision_index=np.arange(2, 2 + count, dtype=np.int32),
            )
        )
    return found


def expected_vectors(model: LlamaNemotronVL, batch: TextBatch) -> Rows:
    return make_text_engine(model, CPU, place(CPU)).launch(batch).result()


def agree(found: Rows, expected: Rows) -> None:
    assert found.values.dtype == found.norms.dtype == np.float32
    np.testing.assert_allclose(found.values, expected.values, atol=2e-5)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-4)
    np.testing.assert_array_equal(found.bounds, expected.bounds)


@pytest.fixture(scope="module", params=list(Layout), ids=str)
def text(request: pytest.FixtureRequest, model: LlamaNemotronVL) -> Loaded:
    profiles = PROFILES if request.param is Layout.PADDED else PACKED_PROFILES
    return Loaded(model, Stage.TEXT, request.param, profiles)


@pytest.mark.parametrize(
    ("lengths", "images"),
    [
        ([1], []),
        ([30, 5, 19, 47], [0, 2]),
        ([180], [0]),
        # more sequences, longer ones, and more rows than any profile takes at once
        ([20, 3, 21, 18, 33, 1, 2, 40, 31, 5], [0, 2, 4, 7, 8]),
        ([170, 2, 180, 4, 47], [0, 2, 4]),
    ],
    ids=str,
)
def test_text_batches_come_back_in_order(
    text: Loaded, model: LlamaNemotronVL, lengths: list[int], images: list[int]
) -> None:
    runs = TextRuns(text.loaded, HostStreams(), "cpu", graph_tokens=0)
    batch = pack(sequences(model, lengths, images))
    agree(runs.launch(batch).result(), expected_vectors(model, batch))


def test_recorded_text_runs_take_other_lengths(text: Loaded, model: LlamaNemotronVL) -> None:
    streams = HostStreams()
    runs = TextRuns(text.loaded, streams, "cpu", graph_tokens=64)
    runs.record(model.max_tokens)
    for number, lengths in enumerate([[16, 9], [3, 14], [30], [2, 2, 2], [17, 31]], start=1):
        batch = pack(sequences(model, lengths, [0] if lengths[0] == 30 else []))
        agree(runs.launch(batch).result(), expected_vectors(model, batch))
        assert streams.replayed == number
    batch = pack(sequences(model, [150]))
    agree(runs.launch(batch).result(), expected_vectors(model, batch))
    assert streams.replayed == 5
    runs.close()


def test_contexts_share_one_block_of_memory(text: Loaded, model: LlamaNemotronVL) -> None:
    runs = TextRuns(text.loaded, HostStreams(), "cpu", graph_tokens=32)
    runs.record(model.max_tokens)
    runs.launch(pack(sequences(model, [100]))).result()
    assert len({context.memory for context in text.engine.contexts}) == 1
    assert text.engine.contexts[0].memory[1] >= 1024


@pytest.fixture(scope="module")
def vision(model: LlamaNemotronVL) -> Loaded:
    return Loaded(model, Stage.VISION, Layout.PACKED)


@pytest.mark.parametrize("graphs", [0, 2])
@pytest.mark.parametrize("counts", [[1], [2, 1], [4], [3, 3, 3]], ids=str)
def test_rows_are_written_into_the_slab(
    vision: Loaded, model: LlamaNemotronVL, counts: list[int], graphs: int
) -> None:
    streams, size = HostStreams(), model.vision.rows(1)
    runs = VisionRuns(vision.loaded, streams, "cpu", graph_tiles=graphs)
    runs.record()
    batch = of_units(model, counts)
    slab = torch.full((12 * size, model.vision.row_width), 7.0)
    bounds = np.cumsum([1, *counts]) * size
    out = [slab[start:end] for start, end in pairwise(bounds)]
    runs.launch(batch, out).result()
    torch.testing.assert_close(slab[bounds[0] : bounds[-1]], computed(model, batch), atol=1e-4, rtol=1e-4)
    assert bool((slab[: bounds[0]] == 7).all()) and bool((slab[bounds[-1] :] == 7).all())
    assert (streams.replayed > 0) == (sum(counts) % 4 in range(1, graphs + 1))
    if sum(counts) > graphs:
        first, last = slab[bounds[0] :].data_ptr(), slab[bounds[-1] :].data_ptr()
        assert any(first <= context.addresses.get("rows", 0) < last for context in vision.engine.contexts)


def test_scattered_rows_are_copied_to_their_places(vision: Loaded, model: LlamaNemotronVL) -> None:
    runs = VisionRuns(vision.loaded, HostStreams(), "cpu", graph_tiles=0)
    batch, size = of_units(model, [2, 1]), model.vision.rows(1)
    slab = torch.full((6 * size, model.vision.row_width), 7.0)
    out = [slab[4 * size :], slab[size : 2 * size]]
    runs.launch(batch, out).result()
    torch.testing.assert_close(torch.cat(out), computed(model, batch), atol=1e-4, rtol=1e-4)
    assert bool((slab[2 * size : 4 * size] == 7).all())


def bound(vision: Loaded, model: LlamaNemotronVL, **changes: torch.Tensor) -> None:
    tensors = {
        "tiles": torch.zeros(1, *model.vision.unit_shape, dtype=torch.uint8),
        "rows": torch.zeros(1, model.vision.rows(1), model.vision.row_width),
    }
    vision.loaded.context(0, 0).bind(tensors | changes)


def test_what_tensorrt_lets_pass_is_refused(vision: Loaded, model: LlamaNemotronVL) -> None:
    bound(vision, model)
    shape, size = model.vision.unit_shape, model.vision.rows(1)
    width = model.vision.row_width
    wrong = {
        "uint8": {"tiles": torch.zeros(1, *shape)},
        "float32": {"rows": torch.zeros(1, size, width, dtype=torch.bfloat16)},
        "outside the profile": {"tiles": torch.zeros(3, *shape, dtype=torch.uint8)},
        "contiguous": {"rows": torch.zeros(1, width, size).transpose(1, 2)},
        "bound was": {"rows": torch.zeros(2, size, width)},
        "does not begin": {"rows": torch.zeros(size * width + 1)[1:].view(1, size, -1)},
        "extra": {"extra": torch.zeros(1)},
    }
    for complaint, changes in wrong.items():
        with pytest.raises(EngineFailed, match=complaint):
            bound(vision, model, **changes)


def test_what_the_runtime_compiled_is_kept_beside_the_plan(
    vision: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    caplog.set_level("INFO")

    def start() -> bytes:
        loaded = LoadedEngine(trt, vision.engine, vision.manifest, tmp_path, "cpu")
        loaded.context(0, 0)
        loaded.save_compiled()
        return (tmp_path / "runtime-Some-GPU.cache").read_bytes()

    assert [start(), start()] == [b"compiled", b"compiled again"]
    (tmp_path / "runtime-Some-GPU.cache").write_bytes(b"of another driver")
    assert start() == b"compiled"
    assert "compiled anew" in caplog.text
    nowhere = LoadedEngine(trt, vision.engine, vision.manifest, tmp_path / "gone", "cpu")
    nowhere.save_compiled()
    assert "compiled at every start" in caplog.text


def test_an_engine_with_other_tensors_than_its_manifest_is_refused(vision: Loaded) -> None:
    first, *others = vision.manifest.bindings
    other = Binding(name=first.name, output=False, dtype="float16", shape=first.shape)
    changed = msgspec.structs.replace(vision.manifest, bindings=(other, *others))
    with pytest.raises(EngineMismatch, match=r"float16.*uint8"):
        LoadedEngine(_WithoutCache(), vision.engine, changed, Path("here"), "cpu")
    fewer = msgspec.structs.replace(vision.manifest, profiles=PROFILES[:1])
    with pytest.raises(EngineMismatch, match=r"1 profiles.*2"):
        LoadedEngine(_WithoutCache(), vision.engine, fewer, Path("here"), "cpu")


def test_every_input_of_the_model_must_fit_a_profile(model: LlamaNemotronVL) -> None:
    spec = BuildSpec(stage=Stage.TEXT, flavour="tensorrt_rtx", profiles=PROFILES)
    wide = BuildSpec(stage=Stage.TEXT, flavour="x", profiles=(*PROFILES, Profile(rows=Range(1, 1, 200))))
    check_text_profiles(manifest(model, wide), 200, "here")
    with pytest.raises(EngineMismatch, match=r"201 tokens.*1\.\.64\.\.200"):
        check_text_profiles(manifest(model, wide), 201, "here")
    with pytest.raises(EngineMismatch, match="may be vision rows"):
        check_text_profiles(manifest(model, spec), 65, "here")
    assert check_vision_profiles(manifest(model, spec), "here") == 4
    gap = (Profile(units=Range(1, 1, 2)), Profile(units=Range(4, 4, 8)))
    with pytest.raises(EngineMismatch, match="3 tiles"):
        check_vision_profiles(manifest(model, BuildSpec(stage="vision", flavour="x", profiles=gap)), "here")


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([40] * 8, [8]),
        ([40, 3, 38, 4, 40, 5], [6]),
        ([2000, 9, 12, 10, 11], [1, 4]),
        ([100, 2000, 1990, 90, 10, 1], [2, 4]),
        ([1000] * 3 + [500] * 9 + [20] * 30, [3, 9, 30]),
    ],
    ids=str,
)
def test_padded_sequences_go_with_others_of_similar_length(lengths: list[int], expected: list[int]) -> None:
    wide = Profile(sequences=Range(1, 8, 64), tokens=Range(1, 64, 4096), rows=Range(1, 8, 8))
    runs = Sizes([wide], Layout.PADDED, coarse=0).cut(lengths, [0] * len(lengths))
    assert [len(run.members) for run in runs] == expected
    assert sorted(member for run in runs for member in run.members) == list(range(len(lengths)))
    assert all(run.tokens >= lengths[member] for run in runs for member in run.members)
    assert len(Sizes([wide], Layout.PACKED, coarse=0).cut([9, 40, 2], [0] * 3)) == 1


def test_a_sequence_beyond_every_profile_is_named() -> None:
    with pytest.raises(EngineFailed, match="201 tokens"):
        Sizes(PROFILES, Layout.PADDED, coarse=0).cut([3, 201], [0, 0])


@pytest.mark.parametrize("layout", list(Layout), ids=str)
def test_a_text_engine_warms_up_and_serves(
    model: LlamaNemotronVL, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = Profile(sequences=Range(1, 1, 4), tokens=Range(1, 64, 400), rows=Range(1, 16, 400))
    held = Loaded(model, Stage.TEXT, layout, (*PROFILES, long))
    monkeypatch.setattr(tensorrt_text, "open_engine", lambda *_: held.loaded)
    monkeypatch.setattr(tensorrt_text, "CudaStreams", lambda _: HostStreams())
    monkeypatch.setattr(tensorrt_text, "tune_interpreter", lambda: None)
    engine = make_text_engine(model, config(Path("engine")), HERE)
    assert engine.cost(3, 12, 10) == (30 if layout is Layout.PADDED else 12)
    assert engine.depth == 2
    engine.warm()
    batch = pack(sequences(model, [12, 90, 3], [1]))
    agree(engine.launch(batch).result(), expected_vectors(model, batch))
    engine.close()


def test_a_text_engine_that_is_too_narrow_for_the_checkpoint_is_refused(
    model: LlamaNemotronVL, monkeypatch: pytest.MonkeyPatch, text: Loaded
) -> None:
    monkeypatch.setattr(tensorrt_text, "open_engine", lambda *_: text.loaded)
    with pytest.raises(EngineMismatch, match="inputs of 180 tokens"):
        make_text_engine(model, config(Path("engine")), HERE)


def test_a_vision_engine_warms_up_and_serves(
    model: LlamaNemotronVL, vision: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_vision, "open_engine", lambda *_: vision.loaded)
    monkeypatch.setattr(tensorrt_vision, "CudaStreams", lambda _: HostStreams())
    monkeypatch.setattr(tensorrt_vision, "tune_interpreter", lambda: None)
    engine = make_vision_engine(model, config(Path("engine")), HERE)
    assert (engine.cost(3, 12, 10), engine.depth) == (12, 2)
    engine.warm()
    batch = of_units(model, [3])
    out = torch.empty(model.vision.rows(3), model.vision.row_width)
    engine.launch(batch, [out]).result()
    torch.testing.assert_close(out, computed(model, batch), atol=1e-4, rtol=1e-4)
    engine.close()


@pytest.fixture
def directory(model: LlamaNemotronVL, tmp_path: Path) -> Path:
    (tmp_path / "engine.plan").write_bytes(b"plan")
    spec = BuildSpec(stage=Stage.VISION, flavour="tensorrt_rtx", profiles=PROFILES)
    msgspec.structs.replace(manifest(model, spec), files=file_entries(tmp_path)).write(tmp_path)
    return tmp_path


def config(path: Path | None) -> EngineSettings:
    return EngineSettings(engine="tensorrt", path=path, max_batch_cost=4, max_queue_cost=4)


HERE = Placement(device="cpu", dtype="float32")


def test_without_a_gpu_the_error_says_which_one_is_missing(model: LlamaNemotronVL, directory: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_vision_engine(model, config(directory), HERE)
    for part in [str(directory), "NVIDIA GPU of compute capability 8.9", "'auto' is cpu", "engine: torch"]:
        assert part in caught.value.message


def test_an_engine_of_another_stage_or_checkpoint_is_refused(
    model: LlamaNemotronVL, directory: Path, checkpoint: Path
) -> None:
    with pytest.raises(EngineMismatch, match="its stage is vision, wanted is text"):
        make_text_engine(model, config(directory), HERE)
    other = open_model(checkpoint)
    with pytest.raises(EngineMismatch) as caught:
        make_vision_engine(other, config(directory), HERE)
    assert model.fingerprint in caught.value.message and other.fingerprint in caught.value.message


def test_a_path_is_needed(model: LlamaNemotronVL) -> None:
    with pytest.raises(ConfigError, match="tessera engine build --stage vision"):
        make_vision_engine(model, config(None), HERE)


@pytest.mark.parametrize("make", [make_vision_engine, make_text_engine])
def test_a_family_without_networks_is_refused_by_name_before_anything_is_looked_at(make: Any) -> None:
    with pytest.raises(ConfigError, match="family grid describes no networks"):
        make(Grid(Path(), 0), config(Path("nowhere")), HERE)


def test_float32_pixels_are_refused(vision: Loaded, model: LlamaNemotronVL) -> None:
    runs = VisionRuns(vision.loaded, HostStreams(), "cpu", graph_tiles=0)
    plan = ImagePlan(units=1, rows=model.vision.rows(1))
    values = np.zeros((1, *model.vision.unit_shape), np.float32)
    batch = packed(model, [Pixels(values=values, plan=plan)])
    with pytest.raises(EngineFailed, match="uint8 pixels alone"):
        runs.launch(batch, rows_for(model, batch))


def test_an_engine_of_another_flavour_is_refused(model: LlamaNemotronVL, directory: Path) -> None:
    msgspec.structs.replace(Manifest.read(directory), flavour="aoti").write(directory)
    with pytest.raises(EngineMismatch, match="flavour is aoti"):
        make_vision_engine(model, config(directory), HERE)


def test_a_flavour_that_is_not_installed_says_how_to_get_it(model: LlamaNemotronVL, directory: Path) -> None:
    try:
        import tensorrt  # noqa: F401
    except ModuleNotFoundError:
        msgspec.structs.replace(Manifest.read(directory), flavour="tensorrt").write(directory)
        with pytest.raises(ConfigError, match="pip install tensorrt-cu13"):
            make_vision_engine(model, config(directory), HERE)
    else:
        pytest.skip("tensorrt is installed here")
