"""Queries, pages and texts; grids of several shapes, up to five images."""

from __future__ import annotations

from tessera.models.base import Role
from tests.models.qwen3_vl_embedding.cases import LARGE, SMALL, STRIP, TALL, WIDE, WORDS
from tests.models.running import Given

CASES = [
    Given(parts=("river",), role=Role.QUERY),
    Given(parts=("What is shown in the picture?",), role=Role.QUERY),
    Given(parts=("river",)),
    Given(parts=(WORDS * 5,), role=Role.PASSAGE),
    Given(parts=(WIDE,), role=Role.PASSAGE),
    Given(parts=(SMALL,)),
    Given(parts=("a picture of waves", TALL), role=Role.PASSAGE),
    Given(parts=(SMALL, "one", WIDE, TALL, STRIP, LARGE), role=Role.PASSAGE),
]
