"""Very long texts: the same prompts as on a thread, by processes that end with their requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
from benchmarks.proc import children

from tessera.errors import DeadlineExceeded, InvalidInput
from tessera.frontend.request import EmbeddingsRequest, Input, ScoreRequest
from tessera.frontend.serving.dispatch import Call
from tessera.frontend.serving.long_texts import LongTexts
from tessera.frontend.serving.prompts import Prompter
from tessera.models import open_model
from tessera.models.base import Content, PairLimits, PairModel, Pairs, Prompt, Role, Truncate
from tessera.tasks import Deadline
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_rerank import TINY
from tests.waiting import until

pytestmark = pytest.mark.starts

LONG = "na\u0301ive words, and no end of them "
"""Of them 10,000 are longer than what threads tokenise."""


@pytest.fixture
async def prompter(checkpoint: Path) -> AsyncIterator[Prompter]:
    model = open_model(checkpoint)
    long_texts = LongTexts(checkpoint, {}, max_tokens=model.max_tokens, seconds=120.0)
    yield Prompter(model, model.max_tokens, long_texts)
    await long_texts.close()


def call(client: str = "", seconds: float = 120.0) -> Call:
    return Call(request_id="1", deadline=Deadline.after(seconds), client=client)


def texts(*parts: str, truncate: Truncate = Truncate.END) -> EmbeddingsRequest:
    inputs = tuple(
        Input.of(parts=(part,), role=Role.NONE, param=f"input[{at}]") for at, part in enumerate(parts)
    )
    return EmbeddingsRequest(inputs=inputs, truncate=truncate)


async def test_prompts_are_those_of_threads(prompter: Prompter, checkpoint: Path) -> None:
    model = open_model(checkpoint)
    plain = Prompter(model, model.max_tokens)
    given = [
        "",
        LONG * 10_000,
        "",
        "short",
        LONG * 200,
        "e\u0301" * 200_000,
        "\ud800" * 300_000,
        "x" * 65_536,
    ]
    nothing = [()] * len(given)
    for truncate in Truncate:
        request = texts(*given, truncate=truncate)
        expected = await plain.build(request, nothing, call())
        assert_same(await prompter.build(request, nothing, call()), expected)


async def test_documents_are_those_of_threads(prompter: Prompter, checkpoint: Path) -> None:
    model = open_model(checkpoint)
    plain = Prompter(model, model.max_tokens)
    for truncate in (Truncate.NONE, Truncate.END):
        (entry,) = texts("short").inputs
        parts = ("short", " one more", LONG * 10_000)
        document = msgspec.structs.replace(entry, parts=parts, size=sum(map(len, parts)), chunked=True)
        request = EmbeddingsRequest(inputs=(document,), truncate=truncate)
        (expected,) = await plain.build(request, [()], call())
        (found,) = await prompter.build(request, [()], call())
        assert_same([found], [expected])
        if truncate is Truncate.END:
            assert isinstance(found, Prompt) and isinstance(expected, Prompt)
            assert found.chunks is not None and expected.chunks is not None
            assert found.chunks.tolist() == expected.chunks.tolist() and len(found.chunks) == 4


async def test_pairs_are_those_of_threads(tmp_path: Path) -> None:
    path = tmp_path / "reranker"
    write_checkpoint(path, TINY, seed=0)
    model = open_model(path)
    assert isinstance(model, PairModel)
    long_texts = LongTexts(path, {}, max_tokens=model.max_tokens, seconds=120.0)
    prompter, plain = (Prompter(model, model.max_tokens, aside) for aside in (long_texts, None))
    # In three turns; a document that is long itself; and each with a query that is.
    documents = ["", "short", *(LONG * 500 for _ in range(9)), LONG * 10_000, "\ud800"]
    for query in ("a query", LONG * 9_000):
        request = ScoreRequest(
            queries=texts(query).inputs,
            documents=texts(*documents).inputs,
            truncate=Truncate.END,
            max_query_tokens=8,
        )
        nothing = [()] * (1 + len(documents))
        limits = PairLimits(tokens=model.max_tokens, query=8, truncate=Truncate.END)
        pairs = Pairs(
            query=Content(parts=(query,)),
            documents=[Content(parts=(document,)) for document in documents],
            limits=limits,
            param="input[0]",
            params=[entry.param for entry in request.documents],
        )
        whole = model.pairs(pairs)
        assert_same(await plain.pairs(request, nothing, call()), whole)
        assert_same(await prompter.pairs(request, nothing, call()), whole)
    await long_texts.close()


def assert_same(prompts: Sequence[object], expected: Sequence[object]) -> None:
    for got, want in zip(prompts, expected, strict=True):
        assert type(want) is type(got)
        if isinstance(want, Prompt) and isinstance(got, Prompt):
            assert want.tokens.tolist() == got.tokens.tolist()
            assert (want.image_tokens, want.truncated) == (got.image_tokens, got.truncated)
        elif isinstance(want, InvalidInput) and isinstance(got, InvalidInput):
            assert (want.message, want.param) == (got.message, got.param)


async def test_late_and_cancelled_texts_end_their_processes(prompter: Prompter, checkpoint: Path) -> None:
    slow = texts("e\u0301" * 1_900_000, "after")
    await prompter.build(texts(LONG * 10_000), [()], call())
    long_texts = prompter.long_texts
    assert long_texts is not None
    with pytest.raises(DeadlineExceeded):
        await prompter.build(slow, [(), ()], call("alice", seconds=0.3))
    gone = [asyncio.create_task(prompter.build(slow, [(), ()], call("alice"))) for _ in range(8)]
    await until(lambda: long_texts.turns.used == 1 and long_texts.turns.waiting == 7)
    # A key has one process of few; another key's text has the next one.
    await prompter.build(texts(LONG * 10_000), [()], call("bob"))
    assert not any(task.done() for task in gone)
    for task in gone:
        task.cancel()
    await asyncio.wait(gone)
    await until(lambda: not (long_texts.turns.used or long_texts.turns.waiting))
    (prompt,) = await prompter.build(texts(LONG * 10_000), [()], call("alice"))
    assert isinstance(prompt, Prompt)


async def test_processes_end_when_they_are_closed(prompter: Prompter) -> None:
    before = set(children(os.getpid()))
    await prompter.build(texts(LONG * 10_000), [()], call())
    assert set(children(os.getpid())) - before
    assert prompter.long_texts is not None
    await prompter.long_texts.close()
    assert set(children(os.getpid())) <= before
