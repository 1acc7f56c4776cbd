"""Pairs that tell a right forward pass from a wrong one: lengths, what stands beside a colon, scripts."""

from __future__ import annotations

from tests.models.running import Given, Pair

WORDS = "the river under the bridge by the old temple and a market in the light of morning "

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
