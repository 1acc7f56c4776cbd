"""Against transformers' own model reading the same files, and against the same with likely mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tessera.models.llama_nemotron_embed.model import LlamaNemotronEmbed, Options
from tessera_tools.random_checkpoint.llama import TINY, LlamaSpec
from tests.models.conftest import WriteCheckpoint
from tests.models.llama_nemotron_embed.cases import CASES
from tests.models.running import Given, batch_of, company, cosines, nearest, vectors
from tests.references.llama_nemotron_embed import LlamaReference

BARS = {"float32": 0.99999, "bfloat16": 0.998}
CONFIGURATIONS: dict[str, LlamaSpec] = {
    "tiny": TINY,
    "model. before names, shards": replace(TINY, layers=3, kv_heads=4, text_prefix="model.", shards=2),
    "last, rope_parameters": replace(TINY, hidden=256, pooling="last", rope_key="rope_parameters"),
    "cls, no scaling": replace(TINY, hidden=256, head_dim=32, pooling="cls", rope=None),
    "no pooling named": replace(TINY, hidden=256, pooling=None),
}

Record = Callable[[str, Any], None]
Built = tuple[str, LlamaNemotronEmbed, LlamaReference, np.ndarray]
"""The configuration, the model, its reference and the reference's vectors of ``CASES``."""


def reference_vectors(reference: LlamaReference) -> np.ndarray:
    return np.stack([reference.answer(each) for each in CASES])


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def built(request: pytest.FixtureRequest, written: WriteCheckpoint) -> Built:
    path = written(CONFIGURATIONS[request.param], dtype="bfloat16")
    reference = LlamaReference(path)
    return request.param, LlamaNemotronEmbed(path, Options()), reference, reference_vectors(reference)


@pytest.mark.parametrize("dtype", BARS)
def test_vectors(built: Built, dtype: str, record_property: Record) -> None:
    name, model, reference, expected = built
    batch = batch_of(model, None, CASES)
    assert max(batch.lengths) > 1600
    for each, start, stop in zip(CASES, batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        text = "".join(map(str, each.parts))
        assert batch.input_ids[start:stop].tolist() == reference.tokens(text, each.role.value)
    found = vectors(model, model.load_text(dtype=dtype, device="cpu"), batch)
    cosine = cosines(found, expected).min()
    line = f"{name:30}{dtype:10}worst cosine {cosine:.7f}"
    record_property("parity of llama_nemotron_embed with transformers in float32", line)
    assert cosine >= BARS[dtype], line


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
    found = reference_vectors(LlamaReference(written(TINY, dtype="bfloat16")))
    assert nearest(found) < 0.98


def attention_to_the_left_alone(reference: LlamaReference) -> None:
    reference.causal = True


def last_token(reference: LlamaReference) -> None:
    reference.pool = lambda hidden: hidden[-1]


def first_token_left_out_of_the_mean(reference: LlamaReference) -> None:
    reference.pool = lambda hidden: hidden[1:].mean(0)


def state_before_the_final_norm(reference: LlamaReference) -> None:
    reference.model.norm = nn.Identity()


def no_first_token(reference: LlamaReference) -> None:
    whole = reference.tokens
    reference.tokens = lambda *given: whole(*given)[1:]


def no_prefixes(reference: LlamaReference) -> None:
    whole = reference.tokens
    reference.tokens = lambda text, role: whole(text, "none")


def rope_without_its_scaling(reference: LlamaReference) -> None:
    count = len(reference.model.rotary_emb.inv_freq)
    reference.model.rotary_emb.inv_freq = 5e5 ** -(torch.arange(count) / count)


def another_theta(reference: LlamaReference) -> None:
    count = len(reference.model.rotary_emb.inv_freq)
    reference.model.rotary_emb.inv_freq = 1e4 ** -(torch.arange(count) / count)


@pytest.fixture(scope="module")
def found(written: WriteCheckpoint) -> np.ndarray:
    """Our vectors of ``CASES``, to be compared with references that make a mistake."""
    model = LlamaNemotronEmbed(written(TINY, dtype="bfloat16"), Options())
    return vectors(model, model.load_text(dtype="float32", device="cpu"), batch_of(model, None, CASES))


@pytest.mark.parametrize(
    "mistake",
    [
        attention_to_the_left_alone,
        last_token,
        first_token_left_out_of_the_mean,
        state_before_the_final_norm,
        no_first_token,
        no_prefixes,
        rope_without_its_scaling,
        another_theta,
    ],
)
def test_a_mistake_fails_both_bars(
    mistake: Callable[[LlamaReference], None],
    found: np.ndarray,
    written: WriteCheckpoint,
    record_property: Record,
) -> None:
    reference = LlamaReference(written(TINY, dtype="bfloat16"))
    mistake(reference)
    cosine = cosines(found, reference_vectors(reference))
    counts = [(cosine < bar).sum() for bar in BARS.values()]
    line = f"{mistake.__name__.replace('_', ' '):40}worst cosine {cosine.min():9.6f}"
    line += "".join(
        f"  below {bar}: {count} of {len(CASES)}" for bar, count in zip(BARS.values(), counts, strict=True)
    )
    record_property("parity of llama_nemotron_embed with references that make one mistake", line)
    assert all(counts), line
