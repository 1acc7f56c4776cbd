"""Against transformers' own model reading the same files, and against the same with likely mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.models.qwen3_embedding.model import Options, Qwen3Embedding
from tessera_tools.random_checkpoint.qwen3 import TINY, Qwen3Spec
from tests.models.conftest import WriteCheckpoint
from tests.models.parity import (
    BARS,
    Parity,
    Record,
    attention_both_ways,
    check_tokens,
    mean_pooling,
    no_last_token,
    no_norm_of_queries_and_keys,
    plain_rope,
    state_before_the_final_norm,
)
from tests.models.qwen3_embedding.cases import CASES, WORDS
from tests.models.running import Given, batch_of, company, cosines, nearest, vectors
from tests.references.qwen3 import Qwen3Reference

pytestmark = pytest.mark.parity

PARITY = Parity(title="qwen3_embedding", cases=CASES)
CONFIGURATIONS: dict[str, Qwen3Spec] = {
    "tiny": TINY,
    "real heads, bare names": replace(
        TINY, head_dim=128, heads=2, kv_heads=1, layers=3, text_prefix="", appends_end=False, shards=2
    ),
    "other theta": replace(TINY, hidden=192, kv_heads=4, theta=10_000.0, rope_key="rope_parameters"),
}

Built = tuple[str, Qwen3Embedding, Qwen3Reference, np.ndarray]
"""The configuration, the model, its reference and the reference's vectors of ``CASES``."""


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def built(request: pytest.FixtureRequest, written: WriteCheckpoint) -> Built:
    path = written(CONFIGURATIONS[request.param], dtype="bfloat16")
    reference = Qwen3Reference(path)
    return request.param, Qwen3Embedding(path, Options()), reference, PARITY.expected(reference)


@pytest.mark.parametrize("dtype", BARS)
def test_vectors(built: Built, dtype: str, record_property: Record) -> None:
    name, model, reference, expected = built
    batch = batch_of(model, None, CASES)
    check_tokens(batch, CASES, lambda text, each: reference.tokens(text, each.role.value, each.instruction))
    PARITY.check(name, model, expected, dtype, record_property)


def test_company_changes_nothing(built: Built) -> None:
    _, model, *_ = built
    assert company(model, CASES) >= 0.999999


def test_the_cases_are_far_apart(built: Built) -> None:
    *_, found = built
    assert nearest(found) < 0.98


def test_eight_thousand_tokens(written: WriteCheckpoint) -> None:
    path = written(TINY, dtype="bfloat16")
    model = Qwen3Embedding(path, Options())
    batch = batch_of(model, None, [Given(parts=(WORDS * 370,)), CASES[0]])
    assert 8000 < batch.lengths[0] < 8400
    found = vectors(model, model.load_text(dtype="float32", device="cpu"), batch)
    expected = Qwen3Reference(path).vector(batch.input_ids[: batch.lengths[0]].tolist())
    assert cosines(found[:1], expected[None])[0] >= BARS["float32"]


def a_space_behind_the_prompt(reference: Qwen3Reference) -> None:
    whole = reference.tokens
    reference.tokens = lambda text, role, said: whole(f" {text}" if role == "query" else text, role, said)


@pytest.fixture(scope="module")
def found(written: WriteCheckpoint) -> np.ndarray:
    """Our vectors of ``CASES``, to be compared with references that make a mistake."""
    return PARITY.found(Qwen3Embedding(written(TINY, dtype="bfloat16"), Options()))


MISTAKES: dict[str, Callable[[Any], None]] = {
    "attention both ways": attention_both_ways,
    "mean pooling": mean_pooling,
    "state before the final norm": state_before_the_final_norm,
    "no norm of queries and keys": no_norm_of_queries_and_keys,
    "no end token": no_last_token,
    "a space behind the prompt": a_space_behind_the_prompt,
    "theta of the larger family": plain_rope(5e6),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_fails_both_bars(
    mistake: str, found: np.ndarray, written: WriteCheckpoint, record_property: Record
) -> None:
    reference = Qwen3Reference(written(TINY, dtype="bfloat16"))
    MISTAKES[mistake](reference)
    PARITY.check_mistake(mistake, reference, found, record_property)
