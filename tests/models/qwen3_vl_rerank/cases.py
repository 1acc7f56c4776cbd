"""Pairs with images on either side, on both, and on none."""

from __future__ import annotations

from tests.models.qwen3_vl_embedding.cases import LARGE, SMALL, STRIP, TALL, WIDE, WORDS
from tests.models.running import Given, Pair

CASES = [
    Pair(query=Given(parts=query, instruction=instruction), document=Given(parts=document))
    for query, document, instruction in (
        (("river",), ("temple",), None),
        (("What is shown in the picture?",), ("été naïve 東京",), "Find the caption of a picture"),
        (("a market!",), ("!!! ??? " + WORDS * 5,), None),
        (("river\n",), (SMALL,), None),
        (("river",), (WIDE, "the river under the bridge"), None),
        (("What is shown?",), ("a market", TALL), "Find the page"),
        ((LARGE, "river"), ("the river under the bridge",), None),
        ((WIDE,), (TALL,), None),
        ((TALL,), (WIDE,), None),
        ((STRIP, SMALL), (LARGE, "morning", WIDE, SMALL), None),
    )
]
