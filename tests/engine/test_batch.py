"""Batches are packed end to end, and each vision row keeps its place."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.engine.batch import PackedInput, pack, packed_cost, padded_cost, split


def test_a_batch_of_text_and_images() -> None:
    rows = torch.ones(2, 4)
    batch = pack(
        [
            PackedInput(tokens=np.array([5, 6, 7], np.int32)),
            PackedInput(
                tokens=np.array([1, 9, 9, 2], np.int32),
                vision=(rows,),
                vision_index=np.array([1, 2], np.int32),
            ),
        ]
    )
    assert batch.input_ids.tolist() == [5, 6, 7, 1, 9, 9, 2]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 3, 7]
    assert batch.lengths == (3, 4)
    assert batch.vision_index.tolist() == [4, 5]
    assert batch.vision[0] is rows


def test_text_alone_has_no_vision() -> None:
    batch = pack([PackedInput(tokens=np.array([1], np.int32))])
    assert batch.vision == () and batch.vision_index.tolist() == []


def numbered(layout: list[list[bool]]) -> list[PackedInput]:
    """Each sequence is a list of places; true marks a vision row. Tokens and rows are numbered throughout."""
    number = 0
    inputs = []
    for places in layout:
        tokens = np.arange(number, number + len(places), dtype=np.int32)
        index = np.flatnonzero(places).astype(np.int32)
        vision = (torch.from_numpy(tokens[index].astype(np.float32))[:, None],) if len(index) else ()
        inputs.append(PackedInput(tokens=tokens, vision=vision, vision_index=index))
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
        assert batch.positions[start:end].tolist() == list(range(len(places)))
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
    batch = pack([PackedInput(tokens=np.zeros(105, np.int32)) for _ in range(78)])
    assert [len(piece.lengths) for piece in split(batch, 8)] == [10, 10, 9, 10, 10, 10, 9, 10]
    assert [len(piece.lengths) for piece in split(batch, 100)] == [1] * 78


def test_costs() -> None:
    assert packed_cost(3, 60, 30) == 60
    assert padded_cost(3, 60, 30) == 90
