"""Logits of pairs with images against transformers' own modules, and with likely mistakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.errors import InvalidInput
from tessera.models import open_model
from tessera.models.base import Content, Output, OutputKind, PairLimits, PairModel, Pairs, Prompt, Truncate
from tessera.models.llama_nemotron_vl.model import LlamaNemotronRerankVL
from tessera_tools.random_checkpoint.llama_nemotron_vl import RERANK_TINY
from tests.models.conftest import WriteCheckpoint
from tests.models.llama_nemotron_rerank.test_parity import document_first
from tests.models.llama_nemotron_rerank_vl.cases import CASES, ONE
from tests.models.pairing import expected
from tests.models.parity import no_first_token
from tests.models.running import Pair, batch_of, preprocessed, prompt, vectors
from tests.models.test_parity import causal_pages
from tests.references.rerank import RerankVLReference, text

pytestmark = pytest.mark.parity

SMALL = replace(RERANK_TINY, image_size=64, base_vocab=600, temperature=0.5)


@pytest.fixture(scope="module")
def path(written: WriteCheckpoint) -> Path:
    return written(SMALL)


def logits(model: LlamaNemotronRerankVL, pairs: Sequence[Pair]) -> np.ndarray:
    vision = model.load_vision(dtype="float32", device="cpu")
    return vectors(model, model.load_text(dtype="float32", device="cpu"), batch_of(model, vision, pairs))


def test_logits(path: Path) -> None:
    model = open_model(path)
    assert isinstance(model, LlamaNemotronRerankVL) and isinstance(model, PairModel)
    assert model.output == Output(kind=OutputKind.SCORE, width=1, unit_length=False, pooling="mean")
    reference = RerankVLReference(path)
    wanted = expected(reference, CASES)
    assert wanted.std() >= 1
    pixels = preprocessed(model, CASES)
    for pair in CASES:
        tiles = [len(pixels[image].values) for image in pair.images]
        ids = prompt(model, pair, pixels).tokens.tolist()
        assert ids == reference.pair_tokens(text(pair.query), text(pair.document), tiles)
    found = logits(model, CASES)
    assert np.abs(found - wanted).max() <= 1e-4
    alone = np.concatenate([logits(model, [pair]) for pair in CASES])
    assert np.abs(found - alone).max() <= 1e-4


def last_token(reference: RerankVLReference) -> None:
    reference.config["pooling"] = "last"


def images_of_the_document_first(reference: RerankVLReference) -> None:
    whole = reference.answer

    def answer(pair: Pair) -> np.ndarray:
        query, document = pair.query, pair.document
        return whole(
            Pair(
                query=replace(query, parts=(*document.images, text(query))),
                document=replace(document, parts=(*query.images, text(document))),
            )
        )

    reference.answer = answer  # type: ignore[method-assign]


def images_behind_the_text(reference: RerankVLReference) -> None:
    def tokens(text: str | None, tiles: list[int], role: str) -> list[int]:
        count = reference.processor["num_image_token"]
        blocks = [" <img>" + "<IMG_CONTEXT>" * (count * each) + "</img>" for each in tiles]
        ids: list[int] = reference.tokenizer.encode((text or "") + "".join(blocks)).ids
        return ids

    reference.tokens = tokens  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "mistake",
    [
        causal_pages,
        last_token,
        no_first_token,
        document_first,
        images_of_the_document_first,
        images_behind_the_text,
    ],
)
def test_a_mistake_fails_the_bar(path: Path, mistake: Callable[[RerankVLReference], None]) -> None:
    reference = RerankVLReference(path)
    mistake(reference)
    difference = np.abs(logits(LlamaNemotronRerankVL(path), CASES) - expected(reference, CASES))
    assert difference.max() > 0.02


def test_what_is_too_long_loses_text_of_the_document(path: Path) -> None:
    model = LlamaNemotronRerankVL(path)
    image = preprocessed(model, [CASES[3]])[ONE].plan
    query, words = Content(parts=("river",)), "the river under the bridge by the old temple"

    def pair(limit: int, *parts: Any) -> Prompt | InvalidInput:
        limits = PairLimits(tokens=limit, truncate=Truncate.END)
        document = Content(parts=parts)
        (made,) = model.pairs(
            Pairs(query=query, documents=[document], limits=limits, param="query", params=["x"])
        )
        return made

    whole, bare = pair(1000, image, words), pair(1000, image)
    assert isinstance(whole, Prompt) and isinstance(bare, Prompt)
    assert bare.image_tokens == whole.image_tokens == image.rows
    cut = pair(len(bare.tokens) + 3, image, words)
    assert isinstance(cut, Prompt) and cut.truncated and cut.image_tokens == image.rows
    assert cut.tokens.tolist() == whole.tokens[: len(cut.tokens)].tolist()
    refused = pair(len(bare.tokens) - 2, image, words)
    assert isinstance(refused, InvalidInput) and "images are not truncated" in refused.message
