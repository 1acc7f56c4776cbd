"""Pairs that tell a right forward pass from a wrong one: lengths of either side, scripts."""

from __future__ import annotations

from tests.models.bert.cases import WORDS
from tests.models.running import Given, Pair

CASES = [
    Pair(query=Given(parts=(query,)), document=Given(parts=(document,)))
    for query, document in (
        ("river", "temple"),
        ("river", "the river under the bridge"),
        ("What is shown in the picture?", "été naïve 東京"),
        ("a market", WORDS * 11),
        ("bridge", "12345 67890 !!! ???"),
        (WORDS * 5, "light"),
        ("xyz qqq", "zzzz kkkk vvvv"),
    )
]
