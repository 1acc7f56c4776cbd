"""The torch engines on the CPU: company changes nothing, and rows go where they were asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tessera.engine.batch import PackedInput, pack
from tessera.engine.factory import make_text_engine, make_vision_engine
from tessera.engine.placement import Placement, place
from tessera.engine.settings import EngineSettings
from tessera.engine.torch.cuda import graph_cost
from tessera.errors import ConfigError
from tessera.models import Model, open_model
from tessera.models.base import ImagePlan, Pixels, TextTensors, VisionSpec
from tests.engine.packed_images import noise, packed, rows_for
from tests.families.dual_encoder import DualEncoder
from tests.families.grid import Grid, reference_rows
from tests.torch_threads import torch_threads

CONFIG = EngineSettings(device="cpu", dtype="float32", max_batch_cost=64, max_queue_cost=64)
HERE = place(CONFIG)


@pytest.fixture(scope="module", params=["llama_nemotron_vl", "grid"])
def model(request: pytest.FixtureRequest) -> Model:
    if request.param == "grid":
        return Grid(Path(), 1)
    return open_model(request.getfixturevalue("checkpoint"))


@pytest.fixture
def lanes() -> Any:
    """Threads enough that batches are taken apart."""
    with torch_threads(2):
        yield


def spec_of(model: Model) -> VisionSpec:
    assert model.vision is not None
    return model.vision


def tokens_only(model: Model, tokens: np.ndarray) -> PackedInput:
    return PackedInput(tokens=tokens, positions=model.positions(tokens, ()))


def image(model: Model, width: int, height: int, *, seed: int = 0) -> Pixels:
    return noise(model, model.plan(width, height, param="image"), seed)


def launch(model: Model, engine: Any, images: Sequence[Pixels]) -> list[torch.Tensor]:
    batch = packed(model, images)
    out = rows_for(model, batch)
    launched = engine.launch(batch, out)
    launched.result()
    assert launched.done()
    return out


def test_text_in_company_equals_text_alone(model: Model) -> None:
    engine = make_text_engine(model, CONFIG, HERE)
    engine.warm()
    chance = np.random.default_rng(0)
    inputs = [
        tokens_only(model, chance.integers(0, 200, size).astype(np.int32)) for size in (1, 7, 30, 64, 2)
    ]
    together = engine.launch(pack(inputs)).result()
    assert together.values.shape == (5, model.output.width) and together.values.dtype == np.float32
    assert together.norms.shape == (5,) and together.norms.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(together.values, axis=1), 1.0, atol=1e-5)
    for entry, own in zip(inputs, together, strict=True):
        alone = engine.launch(pack([entry])).result()
        np.testing.assert_allclose(alone.values, own.values, atol=1e-5)
        np.testing.assert_allclose(alone.norms, own.norms, rtol=1e-5)
    engine.close()


def test_a_batch_in_pieces_equals_its_inputs_alone(model: Model, lanes: None) -> None:
    engine = make_text_engine(model, CONFIG, HERE)
    chance = np.random.default_rng(1)
    width = spec_of(model).row_width
    rows = torch.from_numpy(chance.standard_normal((3, width)).astype(np.float32))
    inputs = [
        tokens_only(model, chance.integers(0, 200, size).astype(np.int32))
        for size in chance.integers(200, 400, 24)
    ]
    for number in (0, 11, 23):
        inputs[number] = PackedInput(
            tokens=inputs[number].tokens,
            positions=inputs[number].positions,
            vision=(rows[:1], rows[1:]),
            vision_index=np.array([number, 40, 41], np.int32),
        )
    together = engine.launch(pack(inputs)).result()
    assert together.values.shape == (24, model.output.width)
    for entry, own in zip(inputs, together, strict=True):
        alone = engine.launch(pack([entry])).result()
        np.testing.assert_allclose(alone.values, own.values, atol=1e-5)
        np.testing.assert_allclose(alone.norms, own.norms, rtol=1e-5)
    engine.close()


@pytest.mark.parametrize(
    "sizes", [[(40, 40)], [(300, 1500), (40, 40), (700, 700)], [(64, 64)] * 8], ids=["one", "mixed", "many"]
)
def test_images_in_company_equal_images_alone(
    model: Model, lanes: None, sizes: list[tuple[int, int]]
) -> None:
    engine = make_vision_engine(model, CONFIG, HERE)
    engine.warm()
    images = [image(model, *size, seed=number) for number, size in enumerate(sizes)]
    for one, rows in zip(images, launch(model, engine, images), strict=True):
        (alone,) = launch(model, engine, [one])
        torch.testing.assert_close(rows, alone, atol=1e-4, rtol=1e-4)
    engine.close()


def test_rows_are_written_where_they_were_asked_for_and_nowhere_else(model: Model) -> None:
    engine = make_vision_engine(model, CONFIG, HERE)
    images = [image(model, 40, 40), image(model, 300, 1500)]
    first, second = (one.plan.rows for one in images)
    slab = torch.full((first + second + 3, spec_of(model).row_width), 7.0)
    out = [slab[second + 2 : second + 2 + first], slab[1 : 1 + second]]
    engine.launch(packed(model, images), out).result()
    assert bool((slab[[0, second + 1, -1]] == 7).all())
    for rows, alone in zip(out, launch(model, engine, images), strict=True):
        torch.testing.assert_close(rows, alone)
    engine.close()


def test_rows_of_images_agree_with_numpy(lanes: None) -> None:
    """Bytes and pixels that a client normalised, in one batch and in any order."""
    model = Grid(Path(), 4)
    engine = make_vision_engine(model, CONFIG, HERE)
    images = [image(model, *size) for size in ((16, 24), (64, 64), (8, 40), (33, 8))]
    for number in (1, 2):
        values = (images[number].values / np.float32(99.0)).astype(np.float32)
        images[number] = Pixels(values=values, plan=images[number].plan)
    for one, rows in zip(images, launch(model, engine, images), strict=True):
        expected = reference_rows(model.seed, one, model.unit_positions(one.plan))
        np.testing.assert_allclose(rows.numpy(), expected, rtol=1e-4, atol=1e-5)
    engine.close()


def recorded(model: Any, calls: list[tuple[int, int]]) -> Any:
    """The model with a vision module that notes units and images of each call."""

    def load(**how: str) -> Callable[..., torch.Tensor]:
        module = model.load_vision(**how)

        def counted(pixels: torch.Tensor, positions: Any, cu_units: Any, units: Any) -> torch.Tensor:
            calls.append((len(pixels), len(units)))
            return cast(torch.Tensor, module(pixels, positions, cu_units, units))

        return counted

    names = ("family", "vision", "features", "unit_positions")
    return SimpleNamespace(**{name: getattr(model, name) for name in names}, load_vision=load)


def test_only_independent_units_are_taken_apart(lanes: None) -> None:
    calls: list[tuple[int, int]] = []
    grid, dual = Grid(Path(), 1), DualEncoder(Path(), 1)
    for model, images, expected in (
        # Two lanes and no way to share one image, or eight images evenly.
        (grid, [image(grid, 64, 64)], [(256, 1)]),
        (grid, [image(grid, 16, 16)] * 8, [(16, 1)] * 8),
        (dual, [image(dual, 9, 9)] * 4, [(1, 1)] * 4),
    ):
        engine = make_vision_engine(recorded(model, calls), CONFIG, HERE)
        calls.clear()
        launch(model, engine, images)
        assert calls == expected
        engine.close()


def test_units_of_one_image_go_to_several_lanes(lanes: None) -> None:
    calls: list[tuple[int, int]] = []
    model: Any = DualEncoder(Path(), 1)
    spied = recorded(model, calls)
    spied.vision = VisionSpec(
        row_width=model.vision.row_width,
        unit_shape=model.vision.unit_shape,
        largest=ImagePlan(units=6, rows=6),
        independent_units=True,
    )
    six = noise(model, ImagePlan(units=6, rows=6))
    engine = make_vision_engine(spied, CONFIG, HERE)
    (rows,) = launch(model, engine, [six])
    assert calls == [(1, 1)] * 6
    whole = model.load_vision(dtype="float32", device="cpu")(torch.from_numpy(six.values), None, None, None)
    torch.testing.assert_close(rows, whole)
    engine.close()


GPU = Placement(device="cuda", dtype="bfloat16")


def unloadable(model: Any, **changes: object) -> Any:
    """The model, whose weights must not be looked at."""

    def load(**how: str) -> None:
        raise AssertionError("weights were loaded")

    names = ("family", "vision", "features", "unit_positions", "output", "positions", "max_tokens")
    given = {name: getattr(model, name) for name in names} | changes
    return SimpleNamespace(**given, load_vision=load, load_text=load)


@pytest.mark.parametrize("make", [make_vision_engine, make_text_engine])
def test_what_a_family_does_not_offer_is_refused_by_name_before_weights_are_loaded(
    make: Callable[..., object],
) -> None:
    model = unloadable(DualEncoder(Path(), 0))
    for settings, named in (
        (EngineSettings(graph_cost=8, max_batch_cost=8, max_queue_cost=8), "graph_cost 8.*dual_encoder"),
        (EngineSettings(quantization="fp8", max_batch_cost=8, max_queue_cost=8), "fp8.*dual_encoder"),
    ):
        with pytest.raises(ConfigError, match=named):
            make(model, settings, GPU)
    for settings in (
        EngineSettings(max_batch_cost=8, max_queue_cost=8),
        EngineSettings(graph_cost=0, max_batch_cost=8, max_queue_cost=8),
    ):
        with pytest.raises(AssertionError, match="weights were loaded"):
            make(model, settings, GPU)


@pytest.mark.parametrize("make", [make_vision_engine, make_text_engine])
def test_float32_is_not_recorded(make: Callable[..., object]) -> None:
    """Its attention goes by lengths on the host, which a replay would not see."""
    asked = EngineSettings(graph_cost=8, max_batch_cost=8, max_queue_cost=8)
    at = Placement(device="cuda", dtype="float32")
    with pytest.raises(ConfigError, match=r"graph_cost 8: .* in float32"):
        make(unloadable(Grid(Path(), 0)), asked, at)
    assert graph_cost(Grid(Path(), 0), CONFIG, at, default=9) == 0
    assert graph_cost(Grid(Path(), 0), CONFIG, GPU, default=9) == 9
    assert graph_cost(Grid(Path(), 0), CONFIG, HERE, default=9) == 0
    compiled = EngineSettings(engine="aoti", max_batch_cost=8, max_queue_cost=8)
    assert graph_cost(DualEncoder(Path(), 0), compiled, at, default=9) == 9


@pytest.mark.parametrize("engine", ["torch", "tensorrt", "tensorrt_llm", "aoti"])
def test_a_family_without_images_has_no_vision_engine(engine: str) -> None:
    model = unloadable(Grid(Path(), 0), vision=None)
    settings = EngineSettings(engine=engine, max_batch_cost=1, max_queue_cost=1)
    with pytest.raises(ConfigError, match="family grid reads text alone"):
        make_vision_engine(model, settings, HERE)


def test_text_alone_needs_no_vision_rows() -> None:
    """A family that reads text alone, whose module is given none."""
    given: list[torch.Tensor] = []
    model: Any = DualEncoder(Path(), 0)

    def load(**how: str) -> Callable[..., torch.Tensor]:
        module = model.load_text(**how)

        def spied(batch: TextTensors) -> torch.Tensor:
            given.append(batch.vision_rows)
            rows = torch.empty(0, model.output.width)
            return cast(torch.Tensor, module(replace(batch, vision_rows=rows)))

        return spied

    alone = unloadable(model, vision=None)
    alone.load_text = load
    engine = make_text_engine(alone, CONFIG, HERE)
    engine.warm()
    tokens = np.array([65, 66], np.int32)
    found = engine.launch(pack([tokens_only(model, tokens)])).result()
    assert found.values.shape == (1, model.output.width) and {tuple(rows.shape) for rows in given} == {(0, 0)}
    engine.close()


def test_where_an_engine_runs() -> None:
    assert place(CONFIG) == Placement(device="cpu", dtype="float32")
    assert place(CONFIG).torch_dtype is torch.float32
    for device in ("tpu", "cuda:x"):
        with pytest.raises(ConfigError, match=device):
            place(EngineSettings(device=device, max_batch_cost=1, max_queue_cost=1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        place(EngineSettings(device="cuda", max_batch_cost=1, max_queue_cost=1))


def test_an_unknown_engine_is_named(model: Model) -> None:
    config = EngineSettings(engine="steam", max_batch_cost=1, max_queue_cost=1)
    for make in (make_vision_engine, make_text_engine):
        with pytest.raises(ConfigError, match="steam"):
            make(model, config, place(CONFIG))
