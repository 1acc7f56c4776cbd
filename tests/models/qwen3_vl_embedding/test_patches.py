"""Patches and positions against the reference's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tessera.image_plan import ImagePlan
from tessera.imaging import Picture
from tessera.models.base import Content, Truncate
from tessera.models.qwen3_vl_embedding.model import Qwen3VLEmbedding
from tests.models.qwen3_vl_embedding.pictures import picture
from tests.references.qwen3 import Qwen3VLReference


@pytest.fixture(scope="module")
def processor(path) -> Qwen3VLReference:
    return Qwen3VLReference(path)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("width", "height", "mode"),
    [
        (64, 64, "RGB"),
        (200, 90, "RGB"),
        (90, 333, "RGB"),
        (1500, 1300, "RGB"),
        (120, 80, "RGBA"),
        (20, 1000, "RGB"),
    ],
)
def test_patches_are_the_processors(
    model: Qwen3VLEmbedding, processor: Qwen3VLReference, width: int, height: int, mode: str
) -> None:
    data = picture(width, height, mode=mode)
    pixels = model.preprocess(Picture(data, param="x"))
    expected, grid = processor.pixels(data)
    assert pixels.plan == model.plan(width, height, param="x")
    assert pixels.plan.grid == grid
    assert pixels.values.dtype == np.uint8
    assert pixels.values.shape == (pixels.plan.units, 3, 16, 16)
    assert pixels.plan.rows * 4 == pixels.plan.units
    normalised = (torch.from_numpy(pixels.values).float() / 255 - 0.5) / 0.5
    frames = expected.view(-1, 3, 2, 16, 16)
    torch.testing.assert_close(frames[:, :, 0], normalised, rtol=0, atol=1e-6)
    assert torch.equal(frames[:, :, 0], frames[:, :, 1])


@pytest.mark.parity
@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 4, 6), (1, 8, 2), (1, 2, 62)])
def test_places_of_patches(model: Qwen3VLEmbedding, grid: tuple[int, int, int]) -> None:
    from transformers.vision_utils import get_vision_position_ids

    _, high, wide = grid
    found = model.unit_positions(ImagePlan(units=high * wide, rows=high * wide // 4, grid=grid))
    assert found.dtype == np.int32
    assert found.shape == (4, high * wide)
    expected = get_vision_position_ids(torch.tensor([grid]), 2)
    assert np.array_equal(
        found[:2], expected.numpy().reshape(-1, 2).T if expected.shape[-1] == 2 else expected
    )
    assert set(found[2]) == {high} and set(found[3]) == {wide}


def test_positions_of_the_published_example(model: Qwen3VLEmbedding) -> None:
    tokens = np.array([7] * 5 + [model.placeholder] * 6 + [7] * 3, np.int32)
    found = model.positions(tokens, [ImagePlan(units=24, rows=6, grid=(1, 4, 6))])
    expected = [(place,) * 3 for place in range(5)]
    expected += [(5, 5, 5), (5, 5, 6), (5, 5, 7), (5, 6, 5), (5, 6, 6), (5, 6, 7)]
    expected += [(8, 8, 8), (9, 9, 9), (10, 10, 10)]
    assert found.dtype == np.int32
    assert [tuple(column) for column in found.T.tolist()] == expected


@pytest.mark.parity
@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [(64, 64)],
        [(64, 200), (300, 40)],
        [(100, 100), (100, 100)],
        [(64, 64), (640, 96), (33, 65), (40, 900), (64, 64)],
    ],
)
@pytest.mark.parametrize("between", ["", "and then"])
def test_positions_are_those_of_transformers(
    model: Qwen3VLEmbedding, processor: Qwen3VLReference, sizes: list[tuple[int, int]], between: str
) -> None:
    plans = [model.plan(*size, param="x") for size in sizes]
    parts = ["a text", *(part for plan in plans for part in (plan, between))]
    made = model.prompt(Content(parts=tuple(parts)), max_tokens=8192, truncate=Truncate.NONE, param="x")
    expected = processor.positions(made.tokens.tolist(), [plan.grid for plan in plans])
    assert np.array_equal(model.positions(made.tokens, plans), expected.numpy())
