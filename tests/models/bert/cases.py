"""Inputs that tell a right forward pass from a wrong one: lengths, scripts, what is in no vocabulary."""

from __future__ import annotations

from tests.models.running import Given

WORDS = "the river under the bridge by the old temple and a market in the light of morning "

CASES = [
    Given(parts=("river",)),
    Given(parts=("What is shown in the picture?",)),
    Given(parts=("été naïve 東京",)),
    Given(
        parts=("two texts ", "are one"),
    ),
    Given(parts=("xyz qqq \U0001f600 zzzz",)),
    Given(parts=(WORDS * 3,)),
    Given(parts=("which price had a winter garden? " * 30,)),
]
