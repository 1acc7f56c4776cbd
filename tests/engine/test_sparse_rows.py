"""Sparse rows of known number: the largest weight of each id, ascending, then rows that hold nothing."""

from __future__ import annotations

import numpy as np

from tessera.engine.batch import merged
from tessera.frontend.serving.result_cache import SharedEntries
from tessera.rows import Rows


def test_weights_of_an_id_are_merged_for_each_input_alone() -> None:
    indices = np.array([7, 3, 7, -1, 3, 5, 5, 9], np.int32)
    weights = np.array([1.0, 2.0, 3.0, 9.0, 4.0, 0.0, -1.0, 6.0], np.float32)[:, None]
    values, ids = merged(weights, indices, np.array([0, 4, 7, 7, 8]))
    assert ids.tolist() == [3, 7, -1, -1, 3, -1, -1, 9]
    assert values[:, 0].tolist() == [2, 3, 0, 0, 4, 0, 0, 6]


def test_merged_is_as_a_dictionary_would_do_it() -> None:
    source = np.random.default_rng(0)
    bounds = np.cumsum([0, *source.integers(1, 40, 50)])
    indices = source.integers(-1, 30, bounds[-1]).astype(np.int32)
    weights = source.standard_normal((bounds[-1], 1)).astype(np.float32)
    values, ids = merged(weights, indices, bounds)
    rows = Rows(values, bounds, np.ones(len(values), np.float32), ids)
    for first, last, own in zip(bounds, bounds[1:], rows, strict=False):
        expected: dict[int, float] = {}
        for token, weight in zip(indices[first:last].tolist(), weights[first:last, 0].tolist(), strict=True):
            if token >= 0 and weight > 0:
                expected[token] = max(weight, expected.get(token, 0.0))
        held = own.held()
        assert held.indices is not None
        found = dict(zip(held.indices.tolist(), held.values[:, 0].tolist(), strict=True))
        assert list(found.items()) == sorted(expected.items())


def test_a_weight_that_is_no_number_is_found() -> None:
    weights = np.array([[1.0], [np.nan]], np.float32)
    values, ids = merged(weights, np.array([4, 5], np.int32), np.array([0, 2]))
    rows = Rows(values, np.array([0, 2]), np.ones(2, np.float32), ids)
    faulty = rows.faulty(unit_length=False)
    assert faulty is not None and faulty.tolist() == [False, True]


def test_rows_that_hold_nothing_are_sound_where_others_have_length_1() -> None:
    values = np.array([[0, 0], [0, 1], [2, 0]], np.float32)
    rows = Rows(values, np.array([0, 3]), np.ones(3, np.float32), np.array([-1, 5, 6], np.int32))
    faulty = rows.faulty(unit_length=True)
    assert faulty is not None and faulty.tolist() == [False, False, True]


def several(inputs: int) -> Rows:
    """Return a vector and two sparse rows of each input."""
    bounds = np.arange(inputs + 1)
    sparse = Rows(
        np.arange(2 * inputs, dtype=np.float32)[:, None],
        2 * bounds,
        np.ones(2 * inputs, np.float32),
        np.arange(2 * inputs, dtype=np.int32),
    )
    values = np.arange(3 * inputs, dtype=np.float32).reshape(inputs, 3)
    return Rows(values, bounds, np.full(inputs, 2, np.float32), None, (sparse,))


def same(found: Rows, expected: Rows) -> bool:
    return all(
        (one.values == other.values).all()
        and (one.norms == other.norms).all()
        and one.bounds.tolist() == other.bounds.tolist()
        and (one.indices is other.indices or one.indices.tolist() == other.indices.tolist())  # type: ignore[union-attr]
        for one, other in zip(found.each(), expected.each(), strict=True)
    )


def test_rows_of_several_outputs_go_together() -> None:
    whole = several(4)
    assert same(Rows.joined(list(whole)), whole)
    assert same(Rows.joined([whole.of(number) for number in range(4)]), whole)
    empty = Rows(
        np.zeros((4, 3), np.float32),
        whole.bounds,
        np.zeros(4, np.float32),
        None,
        (Rows.zeros(whole.others[0].bounds, 1),),
    )
    for number in (2, 0, 3, 1):
        empty = empty.put([number], whole.of(number))
    assert same(empty, whole)
    assert whole.nbytes > sum(rows.values.nbytes for rows in whole.each())


class _Kept(dict[bytes, bytes]):
    """As ``SharedCache``: bytes by key."""

    def put(self, key: bytes, value: bytes) -> None:
        self[key] = value


def test_frontends_keep_rows_of_several_outputs_for_each_other() -> None:
    entries = SharedEntries(_Kept())  # type: ignore[arg-type]
    for number, rows in enumerate(several(3)):
        entries.put(bytes([number]), rows)
        kept = entries.get(bytes([number]))
        assert kept is not None and same(kept, rows)
