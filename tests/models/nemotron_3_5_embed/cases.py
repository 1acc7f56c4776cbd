"""Inputs that tell a right forward pass from a wrong one: roles, grids of several shapes."""

from __future__ import annotations

from tessera.models.base import Role
from tests.models.qwen3_vl_embedding.cases import LARGE, SMALL, STRIP, TALL, WIDE, WORDS
from tests.models.running import Given

CASES = [
    Given(parts=("river",)),
    Given(parts=("What is shown in the picture?",), role=Role.QUERY),
    Given(parts=(WORDS * 40,), role=Role.PASSAGE),
    Given(parts=(SMALL,), role=Role.PASSAGE),
    Given(parts=(WIDE,)),
    Given(parts=(LARGE, "a picture of waves [IMG] <s>"), role=Role.PASSAGE),
    Given(parts=("a tall one", TALL), role=Role.PASSAGE),
    Given(parts=(STRIP, SMALL)),
    Given(parts=(SMALL, WIDE, TALL), role=Role.QUERY),
    Given(parts=(WIDE, TALL, "two ", "texts", SMALL, STRIP, LARGE), role=Role.PASSAGE),
]
