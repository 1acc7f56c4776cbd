"""Queries, texts and images, with the text of a prompt and without."""

from __future__ import annotations

from tessera.models.base import Role
from tests.models.qwen3_vl_embedding.cases import SMALL, TALL, WIDE, WORDS
from tests.models.running import Given

CASES = [
    Given(parts=("river",), role=Role.QUERY),
    Given(parts=("What is shown in the picture?",), role=Role.QUERY),
    Given(parts=("river",)),
    Given(parts=(WORDS * 5,), role=Role.PASSAGE),
    Given(parts=(WIDE,), role=Role.PASSAGE),
    Given(parts=(SMALL,)),
    Given(parts=(TALL, "a picture of waves"), role=Role.PASSAGE),
    Given(parts=("first", SMALL, "then", WIDE)),
]
