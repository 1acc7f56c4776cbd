from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.transport.slab.space import Space


def test_takes_the_first_gap_that_is_long_enough() -> None:
    ranges = Space(10, name="slab")
    assert [ranges.try_take(3), ranges.try_take(3), ranges.try_take(3)] == [0, 3, 6]
    ranges.give(3, 3)
    assert ranges.try_take(4) is None
    assert ranges.try_take(1) == 3
    assert ranges.gaps() == ((4, 2), (9, 1))


def test_neighbours_merge_on_both_sides() -> None:
    ranges = Space(9, name="slab")
    for _ in range(3):
        ranges.try_take(3)
    ranges.give(0, 3)
    ranges.give(6, 3)
    ranges.give(3, 3)
    assert ranges.gaps() == ((0, 9),)
    assert ranges.try_take(9) == 0


@pytest.mark.parametrize(("start", "length"), [(0, 1), (3, 5), (9, 2), (-1, 1), (4, 0)])
def test_refuses_what_was_not_taken(start: int, length: int) -> None:
    ranges = Space(10, name="slab")
    ranges.try_take(6)
    ranges.give(0, 4)
    with pytest.raises(ValueError, match="not taken"):
        ranges.give(start, length)


@given(
    size=st.integers(1, 40),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 100)), max_size=80),
)
def test_never_hands_out_a_unit_twice_and_never_loses_one(
    size: int, steps: list[tuple[bool, int, int]]
) -> None:
    ranges = Space(size, name="slab")
    free = [True] * size
    taken: list[tuple[int, int]] = []
    for take, length, pick in steps:
        if take:
            length = min(length, size)
            start = ranges.try_take(length)
            fits = any(all(free[i : i + length]) for i in range(size - length + 1))
            assert (start is not None) == fits
            if start is not None:
                assert all(free[start : start + length])
                assert not any(all(free[i : i + length]) for i in range(start))
                free[start : start + length] = [False] * length
                taken.append((start, length))
        elif taken:
            start, length = taken.pop(pick % len(taken))
            ranges.give(start, length)
            free[start : start + length] = [True] * length
        assert ranges.used == free.count(False)
        gaps = ranges.gaps()
        assert sum(length for _, length in gaps) == free.count(True)
        # Merged: no gap ends where the next begins.
        assert all(left + length < right for (left, length), (right, _) in itertools.pairwise(gaps))
    for start, length in taken:
        ranges.give(start, length)
    assert ranges.gaps() == ((0, size),)
