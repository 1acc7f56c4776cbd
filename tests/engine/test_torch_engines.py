"""The torch engines on the CPU: company changes nothing, and rows go where they were asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.engine.batch import PackedInput, TextVectors, pack
from tessera.engine.factory import make_text_engine, make_vision_engine
from tessera.engine.placement import Placement, place
from tessera.engine.settings import EngineSettings
from tessera.errors import ConfigError
from tessera.models import Model, open_model

CONFIG = EngineSettings(device="cpu", dtype="float32", max_batch_cost=64, max_queue_cost=64)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    return open_model(checkpoint)


def test_text_in_company_equals_text_alone(model: Model) -> None:
    engine = make_text_engine(model, CONFIG, place(CONFIG))
    engine.warm()
    chance = np.random.default_rng(0)
    inputs = [
        PackedInput(tokens=chance.integers(0, 200, size).astype(np.int32)) for size in (1, 7, 30, 64, 2)
    ]
    together = engine.launch(pack(inputs)).result()
    assert together.vectors.shape == (5, model.hidden) and together.vectors.dtype == np.float32
    assert together.norms.shape == (5,) and together.norms.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(together.vectors, axis=1), 1.0, atol=1e-5)
    for entry, (vector, norm) in zip(inputs, together.by_sequence(), strict=True):
        alone = engine.launch(pack([entry])).result()
        np.testing.assert_allclose(alone.vectors[0], vector, atol=1e-5)
        np.testing.assert_allclose(alone.norms[0], norm, rtol=1e-5)
    engine.close()


def test_a_batch_in_pieces_equals_its_inputs_alone(model: Model) -> None:
    engine = make_text_engine(model, CONFIG, place(CONFIG))
    chance = np.random.default_rng(1)
    rows = torch.from_numpy(chance.standard_normal((3, model.hidden)).astype(np.float32))
    inputs = [
        PackedInput(tokens=chance.integers(0, 200, size).astype(np.int32))
        for size in chance.integers(200, 400, 24)
    ]
    for number in (0, 11, 23):
        index = np.array([number, 40, 41], np.int32)
        inputs[number] = PackedInput(
            tokens=inputs[number].tokens, vision=(rows[:1], rows[1:]), vision_index=index
        )
    together = engine.launch(pack(inputs)).result()
    assert together.vectors.shape == (24, model.hidden)
    for entry, (vector, norm) in zip(inputs, together.by_sequence(), strict=True):
        alone = engine.launch(pack([entry])).result()
        np.testing.assert_allclose(alone.vectors[0], vector, atol=1e-5)
        np.testing.assert_allclose(alone.norms[0], norm, rtol=1e-5)
    engine.close()


def test_a_vector_of_zeros_stays_one() -> None:
    made = TextVectors.of(np.array([[3.0, 4.0], [0.0, 0.0]], np.float32))
    np.testing.assert_allclose(made.vectors, [[0.6, 0.8], [0.0, 0.0]], atol=1e-7)
    np.testing.assert_allclose(made.norms, [5.0, 0.0], atol=1e-6)


def test_vision_rows_are_written_where_they_were_asked_for(model: Model) -> None:
    engine = make_vision_engine(model, CONFIG, place(CONFIG))
    engine.warm()
    chance = np.random.default_rng(0)
    images = [chance.integers(0, 256, (count, *model.tile_shape)).astype(np.uint8) for count in (1, 2)]
    slab = torch.full((6 * model.tokens_per_tile, model.hidden), 7.0)
    size = model.tokens_per_tile
    out = [slab[3 * size : 4 * size], slab[: 2 * size]]
    launched = engine.launch(images, out)
    launched.result()
    assert launched.done()
    assert bool((slab[2 * size : 3 * size] == 7).all()) and bool((slab[4 * size :] == 7).all())
    for tiles, rows in zip(images, out, strict=True):
        alone = torch.empty_like(rows)
        engine.launch([tiles], [alone]).result()
        torch.testing.assert_close(alone, rows, atol=1e-4, rtol=1e-4)
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
