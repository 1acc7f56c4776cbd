"""Inputs that tell a right forward pass from a wrong one: lengths, roles, instructions."""

from __future__ import annotations

from tessera.models.base import Role
from tests.models.running import Given

WORDS = "the river under the bridge by the old temple and a market in the light of morning "

CASES = [
    Given(parts=("river",)),
    Given(parts=("What is shown in the picture?",), role=Role.QUERY),
    Given(parts=("été naïve 東京",), role=Role.QUERY, instruction="Find the page that answers"),
    Given(parts=(WORDS,), role=Role.PASSAGE),
    Given(parts=("two texts ", "are one")),
    Given(parts=(WORDS * 11,), role=Role.PASSAGE),
    Given(parts=(WORDS * 60,), role=Role.QUERY),
]
