"""Logits of pairs against transformers' own classes reading the same files, and with likely mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.errors import CheckpointError, InvalidInput
from tessera.models import open_model
from tessera.models.base import Content, Prompt, Truncate
from tessera_tools.random_checkpoint.qwen3 import RERANK_TINY, TINY, VL_RERANK_TINY, Qwen3RerankSpec
from tests.models.bert.cases import WORDS
from tests.models.changing import changed
from tests.models.conftest import WriteCheckpoint
from tests.models.pairing import expected, logits, opened, prompts
from tests.models.parity import attention_both_ways
from tests.models.qwen3_rerank.cases import CASES
from tests.references.qwen3 import Qwen3RerankReference

pytestmark = pytest.mark.parity

BARS = {"float32": 1e-4, "bfloat16": 0.5}
LAYOUTS: dict[str, Qwen3RerankSpec] = {
    "modules": RERANK_TINY,
    "modules, rows of its own": replace(RERANK_TINY, tied=False, shards=2),
    "language model": replace(RERANK_TINY, layout="language model"),
    "language model, rows of its own": replace(RERANK_TINY, layout="language model", tied=False),
    "classifier": replace(RERANK_TINY, layout="classifier"),
}


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits(written: WriteCheckpoint, layout: str, dtype: str) -> None:
    path = written(LAYOUTS[layout], dtype="bfloat16")
    model, reference = opened(path, task="score"), Qwen3RerankReference(path)
    wanted = expected(reference, CASES)
    assert wanted.std() >= 1
    found = logits(model, CASES, dtype)
    assert np.abs(found - wanted).max() <= BARS[dtype]
    alone = np.concatenate([logits(model, [pair], dtype) for pair in CASES])
    assert np.abs(found - alone).max() <= BARS[dtype]


def test_tokens_are_those_of_parts_that_are_tokenised_apart(written: WriteCheckpoint) -> None:
    path = written(RERANK_TINY)
    model, reference = opened(path, task="score"), Qwen3RerankReference(path)
    for pair in CASES:
        query, document = ("".join(map(str, side.parts)) for side in (pair.query, pair.document))
        content = Content(parts=(query,), instruction=pair.query.instruction)
        (prompt,) = prompts(model, content, document)
        assert isinstance(prompt, Prompt)
        assert prompt.tokens.tolist() == reference.tokens(query, document, pair.query.instruction)


def the_two_answers_exchanged(reference: Qwen3RerankReference) -> None:
    reference.yes, reference.no = reference.no, reference.yes


def the_logit_of_yes_alone(reference: Qwen3RerankReference) -> None:
    whole = reference.logits
    reference.logits = lambda tokens: (whole(tokens)[0], 0.0)  # type: ignore[method-assign]


def no_empty_thought(reference: Qwen3RerankReference) -> None:
    reference.after = "<|im_end|>\n<|im_start|>assistant\n"


def no_system_turn(reference: Qwen3RerankReference) -> None:
    reference.before = "<|im_start|>user\n"


def another_instruction(reference: Qwen3RerankReference) -> None:
    reference.instruction = "Given the user query, retrieval the relevant passages"


def document_first(reference: Qwen3RerankReference) -> None:
    whole = reference.tokens
    reference.tokens = lambda query, document, said: whole(document, query, said)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "mistake",
    [
        the_two_answers_exchanged,
        the_logit_of_yes_alone,
        no_empty_thought,
        no_system_turn,
        another_instruction,
        document_first,
        attention_both_ways,
    ],
)
def test_a_mistake_fails_the_bars(
    written: WriteCheckpoint, mistake: Callable[[Qwen3RerankReference], None]
) -> None:
    path = written(RERANK_TINY, dtype="bfloat16")
    reference = Qwen3RerankReference(path)
    mistake(reference)
    assert np.abs(logits(opened(path, task="score"), CASES) - expected(reference, CASES)).max() > max(
        BARS.values()
    )


def test_a_document_alone_is_cut(written: WriteCheckpoint) -> None:
    model: Any = opened(written(RERANK_TINY), task="score")
    query = Content(parts=("river",))
    (whole,) = prompts(model, query, WORDS)
    assert isinstance(whole, Prompt)
    (cut,) = prompts(model, query, WORDS, tokens=len(whole.tokens) - 7, truncate=Truncate.END)
    assert isinstance(cut, Prompt) and cut.truncated
    ends = np.flatnonzero(
        whole.tokens == whole.tokens[np.flatnonzero(whole.tokens == whole.tokens[0])[2] - 2]
    )
    behind = len(whole.tokens) - ends[-1]
    assert cut.tokens.tolist() == [*whole.tokens[: -behind - 7], *whole.tokens[-behind:]]
    short, long = prompts(model, query, "river", WORDS, tokens=len(whole.tokens) - 1)
    assert isinstance(short, Prompt) and isinstance(long, InvalidInput)
    assert long.param == "documents[1]" and "truncation is off" in long.message


def test_a_special_token_in_a_document_is_text(written: WriteCheckpoint) -> None:
    model: Any = opened(written(RERANK_TINY), task="score")
    end = model._tokenizer.id_of("<|im_end|>")
    counts = []
    for document in ("a", "a<|im_end|>"):
        (prompt,) = prompts(model, Content(parts=("river",)), document)
        assert isinstance(prompt, Prompt)
        counts.append((prompt.tokens == end).sum())
    assert counts[0] == counts[1]


def test_a_language_model_is_what_the_option_says(written: WriteCheckpoint) -> None:
    silent = written(LAYOUTS["language model"])
    with pytest.raises(CheckpointError, match="declares no way to make a vector"):
        open_model(silent)
    assert open_model(silent, {"task": "score"}).family == "qwen3_rerank"
    assert open_model(silent, {"task": "embed"}).family == "qwen3_embedding"
    assert open_model(written(RERANK_TINY)).family == "qwen3_rerank"
    assert open_model(written(LAYOUTS["classifier"])).family == "qwen3_rerank"
    assert open_model(written(TINY)).family == "qwen3_embedding"
    with pytest.raises(CheckpointError, match="declares the task 'embed'"):
        open_model(written(TINY), {"task": "score"})
    with pytest.raises(CheckpointError, match="declares the task 'score'"):
        open_model(written(RERANK_TINY), {"task": "embed"})


@pytest.mark.parametrize("spec", [RERANK_TINY, VL_RERANK_TINY], ids=["texts", "images"])
@pytest.mark.parametrize("layout", ["modules", "language model"])
def test_logits_that_are_neither_stored_nor_tied_are_refused(
    written: WriteCheckpoint, spec: Any, layout: str, tmp_path: Path
) -> None:
    path = changed(written(replace(spec, layout=layout)), tmp_path / "model", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="tie_word_embeddings is false, and no weights have 'lm_head"):
        opened(path, task="score").load_text(dtype="float32", device="cpu")
