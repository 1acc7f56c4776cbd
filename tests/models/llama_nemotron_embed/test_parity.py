"""Against transformers' own model reading the same files, and against the same with likely mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.models.llama_nemotron_embed.model import LlamaNemotronEmbed, Options
from tessera_tools.random_checkpoint.llama import TINY, LlamaSpec
from tests.models.conftest import WriteCheckpoint
from tests.models.llama_nemotron_embed.cases import CASES
from tests.models.parity import (
    BARS,
    Parity,
    Record,
    attention_to_the_left_alone,
    check_tokens,
    first_token_left_out_of_the_mean,
    last_token,
    no_first_token,
    no_prefixes,
    plain_rope,
    state_before_the_final_norm,
)
from tests.models.running import Given, batch_of, company, cosines, nearest, vectors
from tests.references.llama_nemotron_embed import LlamaReference

pytestmark = pytest.mark.parity

PARITY = Parity(title="llama_nemotron_embed", cases=CASES)
CONFIGURATIONS: dict[str, LlamaSpec] = {
    "tiny": TINY,
    "model. before names, shards": replace(TINY, layers=3, kv_heads=4, text_prefix="model.", shards=2),
    "last, rope_parameters": replace(TINY, hidden=256, pooling="last", rope_key="rope_parameters"),
    "cls, no scaling": replace(TINY, hidden=256, head_dim=32, pooling="cls", rope=None),
    "no pooling named": replace(TINY, hidden=256, pooling=None),
}

Built = tuple[str, LlamaNemotronEmbed, LlamaReference, np.ndarray]
"""The configuration, the model, its reference and the reference's vectors of ``CASES``."""


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def built(request: pytest.FixtureRequest, written: WriteCheckpoint) -> Built:
    path = written(CONFIGURATIONS[request.param], dtype="bfloat16")
    reference = LlamaReference(path)
    return request.param, LlamaNemotronEmbed(path, Options()), reference, PARITY.expected(reference)


@pytest.mark.parametrize("dtype", BARS)
def test_vectors(built: Built, dtype: str, record_property: Record) -> None:
    name, model, reference, expected = built
    batch = batch_of(model, None, CASES)
    assert max(batch.lengths) > 1600
    check_tokens(batch, CASES, lambda text, each: reference.tokens(text, each.role.value))
    PARITY.check(name, model, expected, dtype, record_property)


def test_company_changes_nothing(built: Built) -> None:
    _, model, *_ = built
    assert company(model, CASES) >= 0.999999


def test_a_single_token(built: Built) -> None:
    _, model, reference, _ = built
    text = model.load_text(dtype="float32", device="cpu")
    batch = batch_of(model, None, [Given(parts=((7,),))])
    assert tuple(batch.lengths) == (1,)
    assert cosines(vectors(model, text, batch), reference.vector([7])[None])[0] >= BARS["float32"]


def test_the_cases_are_far_apart(written: WriteCheckpoint) -> None:
    found = PARITY.expected(LlamaReference(written(TINY, dtype="bfloat16")))
    assert nearest(found) < 0.98


@pytest.fixture(scope="module")
def found(written: WriteCheckpoint) -> np.ndarray:
    """Our vectors of ``CASES``, to be compared with references that make a mistake."""
    model = LlamaNemotronEmbed(written(TINY, dtype="bfloat16"), Options())
    return PARITY.found(model)


MISTAKES: dict[str, Callable[[Any], None]] = {
    "attention to the left alone": attention_to_the_left_alone,
    "last token": last_token,
    "first token left out of the mean": first_token_left_out_of_the_mean,
    "state before the final norm": state_before_the_final_norm,
    "no first token": no_first_token,
    "no prefixes": no_prefixes,
    "rope without its scaling": plain_rope(5e5),
    "another theta": plain_rope(1e4),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_fails_both_bars(
    mistake: str, found: np.ndarray, written: WriteCheckpoint, record_property: Record
) -> None:
    reference = LlamaReference(written(TINY, dtype="bfloat16"))
    MISTAKES[mistake](reference)
    PARITY.check_mistake(mistake, reference, found, record_property)
