"""Vectors of several inputs keep their order, and what failed, when they are put together."""

from __future__ import annotations

import numpy as np

from tessera.errors import EngineDead
from tessera.local.content import Content, ImageFile
from tessera.local.vectors import Vectors
from tessera.models.base import Role


def test_parts_are_joined_with_their_errors() -> None:
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    dead, other = EngineDead("over it"), EngineDead("over that")
    first = Vectors(rows=rows[:3], counts=[1, 0, 2], tokens=[4, 0, 5], errors={1: other})
    last = Vectors(rows=rows[3:], counts=[1], tokens=[6], errors={})
    joined = Vectors.joined([first, Vectors.failed(dead, 2), last])
    assert len(joined) == 5
    assert [input_rows.tolist() for input_rows in joined] == [[[0, 1]], [], [[2, 3], [4, 5]], [], [[6, 7]]]
    assert list(joined.tokens) == [4, 0, 5, 0, 6] and joined.errors == {1: other, 3: dead}


def test_an_image_without_a_role_is_a_passage() -> None:
    assert Content(parts=("a text",)).role is Role.NONE
    assert Content(parts=("a text", ImageFile(b"file"))).role is Role.PASSAGE
    assert Content(parts=(ImageFile(b"file"),), role=Role.QUERY).role is Role.QUERY
    assert Content(parts=("four", ImageFile(b"file"))).nbytes == 8
