"""Vectors of several inputs keep their order, and what failed, when they are put together and sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tessera.errors import EngineDead, TesseraError
from tessera.local.content import Content, ImageFile
from tessera.local.messages import OutputRows
from tessera.local.vectors import Vectors
from tessera.models.base import Role
from tessera.rows import Rows


def vectors(counts: list[int], *, first: float = 0, errors: dict[int, TesseraError]) -> Vectors:
    """Return vectors of two values, with weights as others: the same values, of token ids that count up."""
    total = sum(counts)
    values = first + np.arange(2 * total, dtype=np.float32).reshape(total, 2)
    bounds = np.cumsum([0, *counts])
    rows = Rows(values, bounds, np.ones(total, np.float32))
    weights = replace(rows, values=values[:, :1], indices=np.arange(total, dtype=np.int32))
    tokens = [4 * count for count in counts]
    return Vectors(rows=replace(rows, others=(weights,)), tokens=tokens, errors=errors)


def test_parts_are_joined_with_their_errors_and_all_of_their_outputs() -> None:
    dead, other = EngineDead("over it"), EngineDead("over that")
    first = vectors([1, 0, 2], errors={1: other})
    joined = Vectors.joined([first, Vectors.failed([dead], [2, 1]), vectors([1], first=6, errors={})])
    assert len(joined) == 5
    values = [[[0, 1]], [], [[2, 3], [4, 5]], [], [[6, 7]]]
    assert [rows.values.tolist() for rows in joined] == values
    weights = [rows.others[0] for rows in joined]
    assert [rows.values[:, 0].tolist() for rows in weights] == [[0], [], [2, 4], [], [6]]
    assert [rows.indices.tolist() for rows in weights if rows.indices is not None] == [
        [0],
        [],
        [1, 2],
        [],
        [0],
    ]
    assert list(joined.tokens) == [4, 0, 8, 0, 4] and joined.errors == {1: other, 3: dead}


def test_rows_are_the_same_in_another_process() -> None:
    sent = vectors([1, 0, 2], errors={}).rows
    for rows, own in zip(sent.each(), [OutputRows.of(rows).rows() for rows in sent.each()], strict=True):
        assert [part.values.tolist() for part in own] == [part.values.tolist() for part in rows]
        assert (own.indices is None) == (rows.indices is None)
    with pytest.raises(ValueError, match="bounds"):
        OutputRows(b"\0" * 8, b"\0" * 8, 2, None).rows()


def test_an_image_without_a_role_is_a_passage() -> None:
    assert Content(parts=("a text",)).role is Role.NONE
    assert Content(parts=("a text", ImageFile(b"file"))).role is Role.PASSAGE
    assert Content(parts=(ImageFile(b"file"),), role=Role.QUERY).role is Role.QUERY
    assert Content(parts=("four", ImageFile(b"file"))).nbytes == 8
