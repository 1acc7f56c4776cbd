"""Inputs that tell a right forward pass from a wrong one: lengths, roles."""

from __future__ import annotations

from tessera.models.base import Role
from tests.models.running import Given

WORDS = "the river under the bridge by the old temple and a market in the light of morning "

CASES = [
    Given(parts=("river",)),
    Given(parts=("river",), role=Role.QUERY),
    Given(parts=("What is shown in the picture?",), role=Role.QUERY),
    Given(parts=("été naïve 東京",), role=Role.PASSAGE),
    Given(parts=("two texts ", "are one"), role=Role.PASSAGE),
    Given(parts=(WORDS * 11,)),
    Given(parts=(WORDS * 100,), role=Role.PASSAGE),
]
