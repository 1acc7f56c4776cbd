"""What is no side of a pair is refused: alone where it is a document, and for all of them as a query."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tessera.errors import InvalidInput
from tessera.image_plan import ImagePlan
from tessera.models.base import Content, PairLimits, Pairs, Prompt
from tessera_tools.random_checkpoint import encoder, llama_rerank, qwen3
from tessera_tools.random_checkpoint.spec import Spec
from tests.models.conftest import WriteCheckpoint
from tests.models.pairing import opened
from tests.models.running import with_ids

SPECS: Final[dict[str, Spec]] = {
    "bert_rerank": encoder.RERANK_TINY,
    "llama_nemotron_rerank": llama_rerank.TINY,
}


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize(
    ("parts", "more", "words"),
    [
        ((), {}, "is empty: it has no text"),
        (("",), {}, "is empty: it has no text"),
        (((5, 6),), {}, "has token ids"),
        (("a",), {"instruction": "Find"}, "has an instruction"),
        (("a", ImagePlan(units=1, rows=4)), {}, "reads text alone"),
        (("\ud800",), {}, "lone surrogate"),
    ],
)
def test_what_is_no_side_of_a_pair(
    family: str, parts: Any, more: Any, words: str, written: WriteCheckpoint
) -> None:
    model = opened(written(SPECS[family]))
    wrong, right = Content(parts=with_ids(parts), **more), Content(parts=("a",))
    limits = PairLimits(tokens=100)
    first, second = model.pairs(
        Pairs(query=right, documents=[wrong, right], limits=limits, param="query", params=["x", "y"])
    )
    assert isinstance(first, InvalidInput) and isinstance(second, Prompt)
    assert first.param == "x" and words in first.message
    with pytest.raises(InvalidInput, match=words) as caught:
        model.pairs(Pairs(query=wrong, documents=[right], limits=limits, param="query", params=["x"]))
    assert caught.value.param == "query"


def test_an_instruction_that_is_no_text(written: WriteCheckpoint) -> None:
    model = opened(written(qwen3.RERANK_TINY), task="score")
    query, document = Content(parts=("a",), instruction="\ud800"), Content(parts=("a",))
    limits = PairLimits(tokens=200)
    with pytest.raises(InvalidInput, match="query holds a lone surrogate at character 0"):
        model.pairs(Pairs(query=query, documents=[document], limits=limits, param="query", params=["x"]))
