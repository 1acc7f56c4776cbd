"""Logits of pairs with images against transformers' own modules, and with likely mistakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.errors import CheckpointError, InvalidInput
from tessera.models import open_model
from tessera.models.base import Content, PairLimits, PairModel, Pairs, Prompt, Truncate
from tessera_tools.random_checkpoint.qwen3 import VL_RERANK_TINY, VL_TINY, Qwen3VLRerankSpec
from tests.models.conftest import WriteCheckpoint
from tests.models.pairing import expected, opened
from tests.models.parity import Record, attention_both_ways
from tests.models.qwen3_rerank.test_parity import no_system_turn, the_two_answers_exchanged
from tests.models.qwen3_vl_embedding.cases import SMALL, WORDS
from tests.models.qwen3_vl_embedding.stages import as_the_largest, check, stages
from tests.models.qwen3_vl_rerank.cases import CASES
from tests.models.running import Pair, batch_of, content_of, preprocessed, prompt, vectors
from tests.references.qwen3 import Qwen3VLRerankReference

pytestmark = pytest.mark.parity

# Of logits up to 17: processors whose products add in another order differ by 1.5e-4.
BARS = {"float32": 5e-4, "bfloat16": 0.6}
LAYOUTS: dict[str, Qwen3VLRerankSpec] = {
    "modules": VL_RERANK_TINY,
    "language model, rows of its own": replace(VL_RERANK_TINY, layout="language model", tied=False, shards=2),
    "as the 8B": replace(as_the_largest(VL_RERANK_TINY), tied=False),
    "classifier": replace(VL_RERANK_TINY, layout="classifier"),
}


def logits(model: PairModel, pairs: Sequence[Pair], dtype: str = "float32") -> np.ndarray:
    vision = model.load_vision(dtype=dtype, device="cpu")
    return vectors(model, model.load_text(dtype=dtype, device="cpu"), batch_of(model, vision, pairs))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits(written: WriteCheckpoint, layout: str, record_property: Record) -> None:
    path = written(LAYOUTS[layout], dtype="bfloat16")
    model, reference = opened(path, task="score"), Qwen3VLRerankReference(path)
    assert model.family == "qwen3_vl_rerank"
    wanted = expected(reference, CASES)
    assert wanted.std() >= 1
    if layout != "classifier":
        whole = np.stack([reference.generated(pair) for pair in CASES[-2:]])
        assert np.abs(whole - wanted[-2:]).max() <= BARS["float32"]
    for dtype, bar in BARS.items():
        worst = np.abs(logits(model, CASES, dtype) - wanted).max()
        line = f"{layout:34}{dtype:10}worst difference {worst:.2e} of logits up to {np.abs(wanted).max():.1f}"
        record_property("parity of qwen3_vl_rerank with transformers in float32", line)
        assert worst <= bar, line
    found = logits(model, CASES)
    alone = np.concatenate([logits(model, [pair]) for pair in CASES])
    assert np.abs(found - alone).max() <= BARS["float32"]


@pytest.mark.parametrize("layout", ["modules", "as the 8B"])
def test_every_stage(written: WriteCheckpoint, layout: str, record_property: Record) -> None:
    path = written(LAYOUTS[layout], dtype="bfloat16")
    found = stages(opened(path, task="score"), Qwen3VLRerankReference(path), CASES)
    check(layout, "qwen3_vl_rerank", found, 0.99999, record_property)


def test_tokens_are_those_of_the_whole_text(written: WriteCheckpoint) -> None:
    path = written(VL_RERANK_TINY)
    model, reference = opened(path, task="score"), Qwen3VLRerankReference(path)
    pixels = preprocessed(model, CASES)
    for pair in CASES:
        sides = [
            [pixels[part].plan.grid if isinstance(part, bytes) else part for part in side.parts]
            for side in (pair.query, pair.document)
        ]
        wanted = reference.pair_tokens(sides[0], sides[1], pair.query.instruction)  # type: ignore[arg-type]
        assert prompt(model, pair, pixels).tokens.tolist() == wanted


def test_a_pair_that_the_client_wrote_has_its_images(written: WriteCheckpoint) -> None:
    model = opened(written(VL_RERANK_TINY), task="score")
    image = model.plan(90, 70, param="x")
    query, document = Content(parts=("river",)), Content(parts=(image, "a bridge"))
    limits = PairLimits(tokens=500)
    (pair,) = model.pairs(
        Pairs(
            query=replace(query, instruction="Judge"),
            documents=[document],
            limits=limits,
            param="q",
            params=["d"],
        )
    )
    assert isinstance(pair, Prompt) and pair.image_tokens == image.rows
    own = Content(parts=("<Instruct>: Judge<Query>:river\n<Document>:", image, "a bridge"))
    made = model.prompt(own, max_tokens=500, truncate=Truncate.NONE, param="x")
    assert made.tokens.tolist() == pair.tokens.tolist() and made.image_tokens == image.rows


def the_logit_of_yes_alone(reference: Qwen3VLRerankReference) -> None:
    whole = reference.logits
    reference.logits = lambda hidden: (whole(hidden)[0], 0.0)  # type: ignore[method-assign]


def an_end_of_text(reference: Qwen3VLRerankReference) -> None:
    reference.after += "<|endoftext|>"


def an_empty_thought(reference: Qwen3VLRerankReference) -> None:
    reference.after += "<think>\n\n</think>\n\n"


def a_space_before_the_document(reference: Qwen3VLRerankReference) -> None:
    reference.between += " "


def document_first(reference: Qwen3VLRerankReference) -> None:
    whole = reference.pair_tokens
    reference.pair_tokens = lambda query, document, said: whole(document, query, said)  # type: ignore[method-assign]


def texts_before_images(reference: Qwen3VLRerankReference) -> None:
    whole = reference.spelled
    reference.spelled = lambda side: (
        whole(  # type: ignore[method-assign]
            [part for part in side if isinstance(part, str)]
        )
        + whole([part for part in side if not isinstance(part, str)])
    )


def flat_positions(reference: Qwen3VLRerankReference) -> None:
    reference.flat_positions = True


def deepstack_dropped(reference: Qwen3VLRerankReference) -> None:
    def same(hidden: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return hidden

    reference.model.language_model._deepstack_process = same


@pytest.fixture(scope="module")
def found(written: WriteCheckpoint) -> np.ndarray:
    """Our logits of ``CASES``, to be compared with references that make a mistake."""
    return logits(opened(written(VL_RERANK_TINY, dtype="bfloat16"), task="score"), CASES)


@pytest.mark.parametrize(
    "mistake",
    [
        the_two_answers_exchanged,
        the_logit_of_yes_alone,
        an_end_of_text,
        an_empty_thought,
        no_system_turn,
        a_space_before_the_document,
        document_first,
        texts_before_images,
        flat_positions,
        deepstack_dropped,
        attention_both_ways,
    ],
)
def test_a_mistake_fails_the_bars(
    found: np.ndarray,
    written: WriteCheckpoint,
    mistake: Callable[[Qwen3VLRerankReference], None],
    record_property: Record,
) -> None:
    reference = Qwen3VLRerankReference(written(VL_RERANK_TINY, dtype="bfloat16"))
    mistake(reference)
    worst = np.abs(found - expected(reference, CASES)).max()
    line = f"{mistake.__name__.replace('_', ' '):42}worst difference {worst:.2f}"
    record_property("parity of qwen3_vl_rerank with references that make one mistake", line)
    assert worst > max(BARS.values()), line


def test_what_is_too_long_loses_text_of_the_document(written: WriteCheckpoint) -> None:
    model = opened(written(VL_RERANK_TINY), task="score")
    given = Pair(query=CASES[0].query, document=replace(CASES[0].document, parts=(SMALL, WORDS)))
    pixels = preprocessed(model, [given])
    query, document = (content_of(side, pixels) for side in (given.query, given.document))

    def cut(limit: int, asked: Content = query) -> Prompt | InvalidInput:
        limits = PairLimits(tokens=limit, truncate=Truncate.END)
        (made,) = model.pairs(
            Pairs(query=asked, documents=[document], limits=limits, param="query", params=["documents[0]"])
        )
        return made

    whole = cut(model.max_tokens)
    assert isinstance(whole, Prompt) and not whole.truncated
    shorter = cut(len(whole.tokens) - 5)
    assert isinstance(shorter, Prompt) and shorter.truncated
    assert shorter.image_tokens == whole.image_tokens == pixels[SMALL].plan.rows
    end = VL_RERANK_TINY.id_of("<|im_end|>")
    behind = len(whole.tokens) - np.flatnonzero(whole.tokens == end)[-1]
    assert shorter.tokens.tolist() == [*whole.tokens[: -behind - 5], *whole.tokens[-behind:]]
    refused = cut(len(whole.tokens) - 60)
    assert isinstance(refused, InvalidInput) and refused.param == "documents[0]"
    with pytest.raises(InvalidInput, match="leaves no room") as raised:
        cut(20, content_of(replace(CASES[0].query, parts=(SMALL, WORDS)), pixels))
    assert raised.value.param == "query"


def test_a_checkpoint_is_what_its_files_or_the_option_say(written: WriteCheckpoint) -> None:
    silent = written(replace(VL_RERANK_TINY, layout="language model"))
    with pytest.raises(CheckpointError, match="declares no way to make a vector"):
        open_model(silent)
    families: list[tuple[Path, dict[str, Any], str]] = [
        (silent, {"task": "score"}, "qwen3_vl_rerank"),
        (silent, {"task": "embed"}, "qwen3_vl_embedding"),
        (written(VL_RERANK_TINY), {}, "qwen3_vl_rerank"),
        (written(LAYOUTS["classifier"]), {}, "qwen3_vl_rerank"),
        (written(VL_TINY), {}, "qwen3_vl_embedding"),
    ]
    for path, options, family in families:
        assert open_model(path, options).family == family
