"""Pairs with images on either side, on both, and on none."""

from __future__ import annotations

from tests.models.llama_nemotron_rerank import cases
from tests.models.llama_nemotron_vl.test_preprocess import encoded, gradient
from tests.models.running import Given, Pair

ONE, TWO, THREE = (encoded(gradient(*size)) for size in ((80, 60), (64, 64), (33, 200)))

CASES = [
    *cases.CASES[:3],
    *(
        Pair(query=Given(parts=query), document=Given(parts=document))
        for query, document in (
            (("river",), (ONE,)),
            (("river",), (TWO,)),
            (("river",), (ONE, "the river under the bridge")),
            (("What is shown?",), ("a market", THREE)),
            ((TWO, "river"), ("the river under the bridge",)),
            ((TWO,), (ONE,)),
            ((ONE,), (TWO,)),
            (("bridge",), (TWO, THREE, "morning")),
        )
    ),
]
