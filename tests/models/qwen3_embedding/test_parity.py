"""Against transformers' own model reading the same files, and against the same with likely mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tessera.models.qwen3_embedding.model import Options, Qwen3Embedding
from tessera_tools.random_checkpoint.qwen3 import TINY, Qwen3Spec
from tests.models.conftest import WriteCheckpoint
from tests.models.qwen3_embedding.cases import CASES, WORDS
from tests.models.running import Given, batch_of, company, cosines, nearest, vectors
from tests.references.qwen3 import Qwen3Reference

BARS = {"float32": 0.99999, "bfloat16": 0.998}
CONFIGURATIONS: dict[str, Qwen3Spec] = {
    "tiny": TINY,
    "real heads, bare names": replace(
        TINY, head_dim=128, heads=2, kv_heads=1, layers=3, text_prefix="", appends_end=False, shards=2
    ),
    "other theta": replace(TINY, hidden=192, kv_heads=4, theta=10_000.0, rope_key="rope_parameters"),
}

Record = Callable[[str, Any], None]
Built = tuple[str, Qwen3Embedding, Qwen3Reference, np.ndarray]
"""The configuration, the model, its reference and the reference's vectors of ``CASES``."""


def reference_vectors(reference: Qwen3Reference, inputs: list[Given]) -> np.ndarray:
    return np.stack([reference.answer(each) for each in inputs])


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def built(request: pytest.FixtureRequest, written: WriteCheckpoint) -> Built:
    path = written(CONFIGURATIONS[request.param], dtype="bfloat16")
    reference = Qwen3Reference(path)
    return request.param, Qwen3Embedding(path, Options()), reference, reference_vectors(reference, CASES)


@pytest.mark.parametrize("dtype", BARS)
def test_vectors(built: Built, dtype: str, record_property: Record) -> None:
    name, model, reference, expected = built
    batch = batch_of(model, None, CASES)
    for each, start, stop in zip(CASES, batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        text = "".join(map(str, each.parts))
        assert batch.input_ids[start:stop].tolist() == reference.tokens(
            text, each.role.value, each.instruction
        )
    found = vectors(model, model.load_text(dtype=dtype, device="cpu"), batch)
    cosine = cosines(found, expected).min()
    line = f"{name:26}{dtype:10}worst cosine {cosine:.7f}"
    record_property("parity of qwen3_embedding with transformers in float32", line)
    assert cosine >= BARS[dtype], line


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


def attention_both_ways(reference: Qwen3Reference) -> None:
    reference.causal = False


def mean_pooling(reference: Qwen3Reference) -> None:
    reference.pool = lambda hidden: hidden.mean(0)


def state_before_the_final_norm(reference: Qwen3Reference) -> None:
    reference.model.norm = nn.Identity()


def no_norm_of_queries_and_keys(reference: Qwen3Reference) -> None:
    for layer in reference.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()


def no_end_token(reference: Qwen3Reference) -> None:
    whole = reference.tokens
    reference.tokens = lambda *given: whole(*given)[:-1]


def a_space_behind_the_prompt(reference: Qwen3Reference) -> None:
    whole = reference.tokens
    reference.tokens = lambda text, role, said: whole(f" {text}" if role == "query" else text, role, said)


def theta_of_the_larger_family(reference: Qwen3Reference) -> None:
    count = len(reference.model.rotary_emb.inv_freq)
    reference.model.rotary_emb.inv_freq = 5e6 ** -(torch.arange(count) / count)


@pytest.fixture(scope="module")
def found(written: WriteCheckpoint) -> np.ndarray:
    """Our vectors of ``CASES``, to be compared with references that make a mistake."""
    model = Qwen3Embedding(written(TINY, dtype="bfloat16"), Options())
    return vectors(model, model.load_text(dtype="float32", device="cpu"), batch_of(model, None, CASES))


@pytest.mark.parametrize(
    "mistake",
    [
        attention_both_ways,
        mean_pooling,
        state_before_the_final_norm,
        no_norm_of_queries_and_keys,
        no_end_token,
        a_space_behind_the_prompt,
        theta_of_the_larger_family,
    ],
)
def test_a_mistake_fails_both_bars(
    mistake: Callable[[Qwen3Reference], None],
    found: np.ndarray,
    written: WriteCheckpoint,
    record_property: Record,
) -> None:
    reference = Qwen3Reference(written(TINY, dtype="bfloat16"))
    mistake(reference)
    cosine = cosines(found, reference_vectors(reference, CASES))
    counts = [(cosine < bar).sum() for bar in BARS.values()]
    line = f"{mistake.__name__.replace('_', ' '):52}worst cosine {cosine.min():9.6f}"
    line += "".join(
        f"  below {bar}: {count} of {len(CASES)}" for bar, count in zip(BARS.values(), counts, strict=True)
    )
    record_property("parity of qwen3_embedding with references that make one mistake", line)
    assert all(counts), line
