"""Pairs that tell a right prompt and forward pass from a wrong one."""

from __future__ import annotations

from tests.models.bert.cases import WORDS
from tests.models.running import Given, Pair

CASES = [
    Pair(query=Given(parts=(query,), instruction=instruction), document=Given(parts=(document,)))
    for query, document, instruction in (
        ("river", "temple", None),
        ("river", "the river under the bridge", None),
        ("What is shown in the picture?", "été naïve 東京", "Find the caption of a picture"),
        ("a market", WORDS * 11, None),
        ("bridge", "12345 67890 !!! ???", None),
        (WORDS * 5, "light", "Given a text, find a word"),
        ("xyz qqq", " \n two lines\nof a document  ", None),
    )
]
