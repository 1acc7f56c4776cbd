"""What tests of rerankers ask a model: the prompts of a query with documents, and their logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tessera.errors import InvalidInput
from tessera.models import open_model
from tessera.models.base import Content, PairLimits, PairModel, Pairs, Prompt
from tests.models.running import Pair, batch_of, vectors


def opened(path: Path, **options: object) -> PairModel:
    model = open_model(path, options)
    assert isinstance(model, PairModel)
    return model


def expected(reference: Any, cases: Sequence[Pair]) -> np.ndarray:
    """The reference's own scores."""
    return np.stack([reference.answer(pair) for pair in cases])


def prompts(
    model: PairModel, asked: str | Content, /, *documents: str, **limits: Any
) -> list[Prompt | InvalidInput]:
    """The prompt of each document, or what is wrong with it; ``limits`` are those of ``PairLimits``."""
    pairs = Pairs(
        query=Content(parts=(asked,)) if isinstance(asked, str) else asked,
        documents=[Content(parts=(document,)) for document in documents],
        limits=PairLimits(**{"tokens": model.max_tokens, **limits}),
        param="query",
        params=[f"documents[{number}]" for number in range(len(documents))],
    )
    return model.pairs(pairs)


def prompt(model: PairModel, asked: str | Content, document: str, /, **limits: Any) -> Prompt:
    (built,) = prompts(model, asked, document, **limits)
    assert isinstance(built, Prompt)
    return built


def tokens(model: PairModel, asked: str | Content, document: str, /, **limits: Any) -> list[int]:
    return list(prompt(model, asked, document, **limits).tokens.tolist())


def logits(model: PairModel, pairs: Sequence[Pair], dtype: str = "float32") -> np.ndarray:
    """Float32 ``[pairs, 1]``, of all pairs in one batch."""
    found = vectors(model, model.load_text(dtype=dtype, device="cpu"), batch_of(model, None, pairs))
    assert found.shape == (len(pairs), 1)
    return found
