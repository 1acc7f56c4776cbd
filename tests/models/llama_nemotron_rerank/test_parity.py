"""Logits of pairs against transformers' own model and a linear head, and with likely mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera.errors import InvalidInput
from tessera.models import open_model
from tessera.models.base import (
    Output,
    OutputKind,
    PairModel,
    Prompt,
    Truncate,
)
from tessera.models.llama_nemotron_embed.model import LlamaNemotronRerank, Options
from tessera_tools.random_checkpoint.llama_rerank import TINY
from tests.models.changing import changed
from tests.models.conftest import WriteCheckpoint
from tests.models.llama_nemotron_rerank.cases import CASES, WORDS
from tests.models.pairing import expected, logits, prompt, prompts
from tests.models.parity import attention_to_the_left_alone, last_token, no_first_token
from tests.references.rerank import RerankReference, text

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logits(written: WriteCheckpoint, temperature: float) -> None:
    path = written(replace(TINY, temperature=temperature))
    model, reference = LlamaNemotronRerank(path, Options()), RerankReference(path)
    wanted = expected(reference, CASES)
    assert wanted.std() >= 1
    found = logits(model, CASES)
    assert np.abs(found - wanted).max() <= 1e-4
    alone = np.concatenate([logits(model, [pair]) for pair in CASES])
    assert np.abs(found - alone).max() <= 1e-4


def document_first(reference: RerankReference) -> None:
    reference.template = "passage:{document} \n \n question:{query}"


def no_spaces_around_line_breaks(reference: RerankReference) -> None:
    reference.template = "question:{query}\n\npassage:{document}"


def space_behind_the_colon(reference: RerankReference) -> None:
    reference.template = "question: {query} \n \n passage: {document}"


def no_temperature(reference: RerankReference) -> None:
    reference.score.temperature = 1.0


@pytest.mark.parametrize(
    "mistake",
    [
        attention_to_the_left_alone,
        last_token,
        no_first_token,
        document_first,
        no_spaces_around_line_breaks,
        space_behind_the_colon,
        no_temperature,
    ],
)
def test_a_mistake_fails_the_bar(
    written: WriteCheckpoint, mistake: Callable[[RerankReference], None]
) -> None:
    path = written(replace(TINY, temperature=0.5))
    reference = RerankReference(path)
    mistake(reference)
    assert (
        np.abs(logits(LlamaNemotronRerank(path, Options()), CASES) - expected(reference, CASES)).max() > 0.02
    )


@pytest.mark.parametrize(
    "query", ["river", "river ", "what?", "what?\n", "  a", "12", "x\u0301", "(", "a:", "\n"]
)
def test_tokens_are_those_of_the_whole_text(written: WriteCheckpoint, query: str) -> None:
    model, reference = LlamaNemotronRerank(written(TINY), Options()), RerankReference(written(TINY))
    documents = [
        "river",
        " river",
        "\nriver",
        ": a",
        "...",
        "1234",
        "\u0301a",
        "'s",
        "\U0001f600",
        "\t",
        "a\n",
    ]
    for document, made in zip(documents, prompts(model, query, *documents), strict=True):
        assert isinstance(made, Prompt)
        assert made.tokens.tolist() == reference.pair_tokens(query, document), (query, document)


def test_another_tokenizer_reads_the_whole_text(written: WriteCheckpoint, tmp_path: Path) -> None:
    """One that may join a word with the mark behind it gets both in one text."""
    path = changed(written(TINY), tmp_path / "joined")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "use_regex": False,
        "trim_offsets": True,
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    model, reference = LlamaNemotronRerank(path, Options()), RerankReference(path)
    for pair in CASES:
        query, document = text(pair.query), text(pair.document)
        assert prompt(model, query, document).tokens.tolist() == reference.pair_tokens(query, document)


def test_a_pair_that_is_too_long(written: WriteCheckpoint) -> None:
    model = LlamaNemotronRerank(written(TINY), Options())
    text = f"1 {WORDS}"  # the colon before it is a token of its own
    whole = prompt(model, "river", text).tokens.tolist()
    head = len(prompt(model, "river", "1").tokens) - 1
    end = prompt(model, "river", text, tokens=head + 5, truncate=Truncate.END)
    assert end.truncated and end.tokens.tolist() == whole[: head + 5]
    start = prompt(model, "river", text, tokens=head + 5, truncate=Truncate.START)
    assert start.truncated and start.tokens.tolist() == whole[:head] + whole[-5:]
    short, long = prompts(model, "river", "1", text, tokens=head + 5)
    assert isinstance(short, Prompt) and not short.truncated
    assert isinstance(long, InvalidInput)
    assert long.param == "documents[1]" and "truncation is off" in long.message
    with pytest.raises(InvalidInput, match=r"query takes .* no room for a document within the limit of 6"):
        prompts(model, "river", "1", tokens=6, truncate=Truncate.END)


def test_bounds_of_a_side(written: WriteCheckpoint) -> None:
    model = LlamaNemotronRerank(written(TINY), Options())
    text = "1 \u6771\u4eac " + WORDS
    for limit in range(1, 12):
        asked = prompt(model, text, "a", query=limit)
        kept = text
        while kept and asked.tokens.tolist() != prompt(model, kept, "a").tokens.tolist():
            kept = kept[:-1]
        assert asked.truncated and text.startswith(kept)
        most = len(prompt(model, "1", "a").tokens) - 1 + limit
        assert most - 5 < len(asked.tokens) <= most
        told = prompt(model, "a", text, document=limit, query=5)
        assert told.truncated
        assert told.tokens.tolist() == prompt(model, "a", text).tokens.tolist()[: len(told.tokens)]
    bounded = prompt(model, "river", "temple", query=50, document=50)
    assert (
        not bounded.truncated and bounded.tokens.tolist() == prompt(model, "river", "temple").tokens.tolist()
    )


def test_what_it_is(written: WriteCheckpoint) -> None:
    model = open_model(written(TINY))
    assert isinstance(model, PairModel) and model.family == "llama_nemotron_rerank"
    assert model.output == Output(kind=OutputKind.SCORE, width=1, unit_length=False, pooling="mean")
