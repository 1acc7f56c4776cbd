"""Queries and documents, of text, of an image, and of both."""

from __future__ import annotations

from tessera.models.base import Role
from tests.models.llama_nemotron_rerank_vl.cases import ONE, THREE, TWO
from tests.models.running import Given

CASES = [
    Given(parts=("river",), role=Role.QUERY),
    Given(parts=("What is shown in the picture?",), role=Role.QUERY),
    Given(parts=("the river under the bridge",), role=Role.PASSAGE),
    Given(parts=("the river under the bridge",)),
    Given(parts=(ONE,), role=Role.PASSAGE),
    Given(parts=(TWO,), role=Role.PASSAGE),
    Given(parts=(THREE, "a market"), role=Role.PASSAGE),
    Given(parts=(TWO,)),
]
