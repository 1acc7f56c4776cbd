"""Batches are packed end to end, and each vision row, image and position keeps its place."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.engine.batch import (
    PackedInput,
    VisionBatch,
    blank,
    output_rows,
    pack,
    pack_images,
    packed_cost,
    padded_cost,
    scaled,
    split,
    split_images,
    uint8_pixels,
    zeros,
)
from tessera.engine.torch.cuda import unit_rows
from tessera.errors import EngineFailed
from tessera.image_plan import ImagePlan
from tessera.models.base import Output, OutputKind, Pixels, sequential
from tests.families.dual_encoder import DualEncoder
from tests.families.grid import MOST, Grid


def three_rows(tokens: int) -> np.ndarray:
    """Positions of three axes that differ."""
    return np.arange(tokens, dtype=np.int32) + np.array([[0], [100], [200]], np.int32)


def test_a_batch_of_text_and_images() -> None:
    rows = torch.ones(2, 4)
    batch = pack(
        [
            PackedInput(tokens=np.array([5, 6, 7], np.int32), positions=three_rows(3)),
            PackedInput(
                tokens=np.array([1, 9, 9, 2], np.int32),
                positions=three_rows(4),
                vision=(rows,),
                vision_index=np.array([1, 2], np.int32),
            ),
        ]
    )
    assert batch.input_ids.tolist() == [5, 6, 7, 1, 9, 9, 2]
    assert batch.positions.tolist() == [
        [0, 1, 2, 0, 1, 2, 3],
        [100, 101, 102, 100, 101, 102, 103],
        [200, 201, 202, 200, 201, 202, 203],
    ]
    assert batch.cu_seqlens.tolist() == [0, 3, 7]
    assert batch.lengths == (3, 4)
    assert batch.vision_index.tolist() == [4, 5]
    assert batch.vision[0] is rows


def test_text_alone_has_no_vision() -> None:
    batch = pack([PackedInput(tokens=np.array([1], np.int32), positions=sequential(1))])
    assert batch.vision == () and batch.vision_index.tolist() == []


def numbered(layout: list[list[bool]]) -> list[PackedInput]:
    """Each sequence is a list of places; true marks a vision row. Tokens and rows are numbered throughout."""
    number = 0
    inputs = []
    for places in layout:
        tokens = np.arange(number, number + len(places), dtype=np.int32)
        index = np.flatnonzero(places).astype(np.int32)
        vision = (torch.from_numpy(tokens[index].astype(np.float32))[:, None],) if len(index) else ()
        inputs.append(
            PackedInput(tokens=tokens, positions=three_rows(len(tokens)), vision=vision, vision_index=index)
        )
        number += len(places)
    return inputs


LAYOUTS = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(LAYOUTS)
def test_any_batch_can_be_taken_apart_again(layout: list[list[bool]]) -> None:
    batch = pack(numbered(layout))
    assert all(array.dtype == np.int32 for array in (batch.input_ids, batch.positions, batch.cu_seqlens))
    assert batch.vision_index.dtype == np.int32
    assert batch.input_ids.tolist() == list(range(sum(map(len, layout))))
    assert batch.lengths == tuple(len(places) for places in layout)
    for start, end, places in zip(batch.cu_seqlens, batch.cu_seqlens[1:], layout, strict=False):
        np.testing.assert_array_equal(batch.positions[:, start:end], three_rows(len(places)))
    flat = torch.cat(batch.vision)[:, 0].tolist() if batch.vision else []
    assert batch.input_ids[batch.vision_index].tolist() == flat


@settings(max_examples=100, deadline=None)
@given(LAYOUTS, st.integers(1, 10))
def test_a_batch_is_split_into_batches_of_its_own_sequences(layout: list[list[bool]], count: int) -> None:
    inputs = numbered(layout)
    pieces = split(pack(inputs), count)
    assert 1 <= len(pieces) <= count
    first = 0
    for piece in pieces:
        own = inputs[first : first + len(piece.lengths)]
        first += len(own)
        expected = pack(own)
        for name in ("input_ids", "positions", "cu_seqlens", "vision_index"):
            found = getattr(piece, name)
            np.testing.assert_array_equal(found, getattr(expected, name))
            assert found.dtype == np.int32
        assert piece.lengths == expected.lengths
        assert len(piece.vision) == len(expected.vision)
        assert all(map(torch.equal, piece.vision, expected.vision))
    assert first == len(inputs)
    # Each end is the nearest to where it should be, half a sequence away at most.
    share, longest = sum(map(len, layout)) / count, max(map(len, layout))
    assert all(len(piece.input_ids) <= share + longest for piece in pieces)


def test_equal_sequences_make_equal_batches() -> None:
    batch = pack([PackedInput(tokens=np.zeros(105, np.int32), positions=sequential(105)) for _ in range(78)])
    assert [len(piece.lengths) for piece in split(batch, 8)] == [10, 10, 9, 10, 10, 10, 9, 10]
    assert [len(piece.lengths) for piece in split(batch, 100)] == [1] * 78


def images(counts: list[int], kinds: list[bool] | None = None) -> VisionBatch:
    """Images of so many units, numbered throughout; ``kinds`` says which are float32. Two rows a unit."""
    found, positions, number = [], [], 0
    for count, is_float in zip(counts, kinds or [False] * len(counts), strict=True):
        numbers = np.arange(number, number + count)
        found.append(
            Pixels(
                values=numbers.astype(np.float32 if is_float else np.uint8)[:, None],
                plan=ImagePlan(units=count, rows=2 * count),
            )
        )
        positions.append(np.stack([numbers, -numbers]).astype(np.int32))
        number += count
    return pack_images(found, positions)


def numbers_of(batch: VisionBatch) -> list[list[int]]:
    """Which units each image has, checked to be the same by pixels, positions and bounds."""
    by_pixels = [image[:, 0].astype(int).tolist() for image in batch.pixels]
    parts = np.split(batch.positions, batch.cu_units[1:-1], axis=1)
    assert [part[0].tolist() for part in parts] == [(-part[1]).tolist() for part in parts] == by_pixels
    assert batch.cu_units.dtype == batch.positions.dtype == np.int32
    assert batch.units == tuple(map(len, by_pixels)) == tuple(plan.units for plan in batch.plans)
    return by_pixels


COUNTS = st.lists(st.integers(1, 6), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(COUNTS, st.integers(1, 10))
def test_images_are_split_between_images(counts: list[int], most: int) -> None:
    batch = images(counts)
    whole = numbers_of(batch)
    pieces = split_images(batch, most)
    assert list(chain.from_iterable(pieces)) == list(range(len(counts))) and 1 <= len(pieces) <= most
    assert list(chain.from_iterable(numbers_of(batch.pick(piece)) for piece in pieces)) == whole
    share = sum(counts) / most
    assert all(sum(batch.pick(piece).units) <= share + max(counts) for piece in pieces)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=6))
def test_images_go_apart_by_the_type_of_their_pixels(given_: list[tuple[int, bool]]) -> None:
    counts, kinds = [count for count, _ in given_], [kind for _, kind in given_]
    batch = images(counts, kinds)
    found = batch.by_type()
    assert sorted(chain.from_iterable(found)) == list(range(len(counts)))
    assert len(found) == len(set(kinds))
    for numbers in found:
        assert len({kinds[number] for number in numbers}) == 1
        assert numbers_of(batch.pick(numbers)) == [numbers_of(batch)[number] for number in numbers]
    if any(kinds):
        with pytest.raises(EngineFailed, match="uint8 pixels alone"):
            uint8_pixels(batch)
    else:
        assert len(uint8_pixels(batch)) == len(counts)


def test_independent_units_are_images_of_their_own() -> None:
    batch = images([3, 1, 2]).by_unit()
    assert numbers_of(batch) == [[0], [1], [2], [3], [4], [5]]
    assert batch.plans == (ImagePlan(units=1, rows=2),) * 6


def test_a_batch_to_warm_up_with_is_as_wide_as_it_is_asked_to_be() -> None:
    model = Grid(Path(), 0)
    batch = blank(model, MOST**2 * 2 + 5)
    # Units that make no whole row are rounded up.
    assert batch.units == (MOST**2, MOST**2, 8)
    assert [plan.rows for plan in batch.plans] == [64, 64, 2]
    assert batch.positions.shape == (2, MOST**2 * 2 + 8) and batch.positions.max() == MOST - 1
    assert {image.dtype for image in batch.pixels} == {np.dtype(np.uint8)}
    alone = blank(DualEncoder(Path(), 0), 2)
    assert alone.units == (1, 1) and alone.positions.shape == (0, 2)


def test_zeros_have_the_positions_of_their_family() -> None:
    batch = zeros(Grid(Path(), 0), 10, 4)
    assert batch.lengths == (4, 4, 2)
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]] * 3


@pytest.mark.parametrize("unit_length", [True, False])
@pytest.mark.parametrize("kind", list(OutputKind))
def test_output_rows_have_bounds_and_norms(kind: OutputKind, unit_length: bool) -> None:
    batch = pack([PackedInput(tokens=np.zeros(n, np.int32), positions=sequential(n)) for n in (2, 1, 3)])
    output = Output(kind=kind, width=2, unit_length=unit_length)
    counts = [2, 1, 3] if kind in (OutputKind.TOKENS, OutputKind.SPARSE) else [1, 1, 1]
    computed = np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 2.0], [1.0, 0.0], [6.0, 8.0], [0.0, 5.0]], np.float32)
    computed = computed[: sum(counts)]
    found = output_rows(computed, batch, output)
    assert found.bounds.tolist() == [0, *np.cumsum(counts)] and found.bounds.dtype == np.int64
    assert [len(own.values) for own in found] == counts
    norms = np.linalg.norm(computed, axis=1) if unit_length else np.ones(len(computed))
    np.testing.assert_allclose(found.norms, norms, rtol=1e-6)
    np.testing.assert_allclose(found.values * found.norms[:, None], computed, rtol=1e-6)
    assert found.values.dtype == found.norms.dtype == np.float32
    if unit_length:
        assert np.linalg.norm(found.values, axis=1).tolist() == pytest.approx([float(n > 0) for n in norms])


def test_a_device_scales_rows_as_the_host_does() -> None:
    output = Output(kind=OutputKind.TOKENS, width=3)
    computed = np.random.default_rng(0).standard_normal((50, 3), np.float32) * np.float32(1e3)
    computed[7] = 0
    expected = scaled(computed, np.array([0, 50]), output)
    values, norms = unit_rows(torch.from_numpy(computed))
    np.testing.assert_allclose(values.numpy(), expected.values, rtol=1e-6)
    np.testing.assert_allclose(norms.numpy(), expected.norms, rtol=1e-6)
    assert values.dtype == norms.dtype == torch.float32


def test_costs() -> None:
    assert packed_cost(3, 60, 30) == 60
    assert padded_cost(3, 60, 30) == 90
