"""Against transformers' own model reading the same files, and against the same with likely mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.models.base import Role
from tessera.models.nemotron_3_embed.model import Nemotron3Embed, Options
from tessera.nn.forms.plain import Residual
from tessera_tools.random_checkpoint.ministral3 import TINY, YARN, Nemotron3Spec
from tests.models.conftest import WriteCheckpoint
from tests.models.nemotron_3_embed.cases import CASES
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
from tests.references.ministral3 import PREFIXES, Ministral3Reference

pytestmark = pytest.mark.parity

PARITY = Parity(title="nemotron_3_embed", cases=CASES)
_SHORT = {**YARN, "original_max_position_embeddings": 256, "factor": 4.0}
CONFIGURATIONS: dict[str, Nemotron3Spec] = {
    "tiny": TINY,
    "model. before names, shards, no marks": replace(
        TINY, layers=3, kv_heads=4, text_prefix="model.", shards=2, marks="none"
    ),
    "attention factor of the scaling, both marks": replace(
        TINY,
        hidden=256,
        head_dim=64,
        marks="bos and eos",
        rope={key: value for key, value in _SHORT.items() if not key.startswith("mscale")},
    ),
    "no scaling, causal, last": replace(
        TINY,
        causal=True,
        pooling="last",
        declares=False,
        rope={"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.3}
        | {"original_max_position_embeddings": 100},
    ),
}

Built = tuple[str, Nemotron3Embed, Ministral3Reference, np.ndarray]
"""The configuration, the model, its reference and the reference's vectors of ``CASES``."""


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def built(request: pytest.FixtureRequest, written: WriteCheckpoint) -> Built:
    path = written(CONFIGURATIONS[request.param], dtype="bfloat16")
    reference = Ministral3Reference(path)
    return request.param, Nemotron3Embed(path, Options()), reference, PARITY.expected(reference)


@pytest.mark.parametrize("dtype", BARS)
def test_vectors(built: Built, dtype: str, record_property: Record) -> None:
    name, model, reference, expected = built
    batch = batch_of(model, None, CASES)
    assert max(batch.lengths) > 2900
    check_tokens(batch, CASES, lambda text, each: reference.tokens(text, each.role.value))
    PARITY.check(name, model, expected, dtype, record_property)


@torch.no_grad()
def test_hidden_states_stage_by_stage(built: Built) -> None:
    """The rotation, its scale of queries, and every layer's output, far beyond the original context."""
    _, model, reference, _ = built
    text = model.load_text(dtype="float32", device="cpu")
    tokens = reference.tokens("the river under the bridge " * 60, "none")
    count = len(tokens)
    ids, at = torch.tensor(tokens, dtype=torch.int32), torch.arange(count, dtype=torch.int32)[None]
    rotation = text.rotary(at)
    cosines_, sines = reference.model.rotary_emb(torch.zeros(1, dtype=torch.float32), at.long())
    half = cosines_.shape[-1] // 2
    # Frequencies differ by a rounding, which position 500 multiplies.
    torch.testing.assert_close(rotation.cosines[:, 0], cosines_[0, :, :half], atol=1e-4, rtol=0)
    torch.testing.assert_close(rotation.sines[:, 0], sines[0, :, :half], atol=1e-4, rtol=0)
    outputs: list[torch.Tensor] = []
    for layer in reference.model.layers:
        layer.register_forward_hook(lambda _, __, given: outputs.append(given[0]))
    last = reference.hidden(tokens)
    found: list[torch.Tensor] = []
    bounds = torch.tensor([0, count], dtype=torch.int32)
    sequences = text.form.packed(bounds, [count])
    (embedded,) = text.embed(ids, torch.empty(0, model.text.row_width), torch.empty(0, dtype=torch.int32))

    def keep(number: int, stream: Residual) -> None:
        found.append(text.layers.output(stream, number).clone())

    text.layers(Residual(embedded), sequences, rotation, keep)
    for ours, theirs in zip(found, outputs, strict=True):
        assert cosines(ours.numpy(), theirs.reshape(count, -1).numpy()).min() >= 0.99999
    whole = text.encode((embedded,), at, sequences)
    assert cosines(whole.numpy(), last.numpy()).min() >= 0.99999


def test_company_changes_nothing(built: Built) -> None:
    _, model, *_ = built
    assert company(model, CASES[:6]) >= 0.999999


def test_a_single_token(built: Built) -> None:
    _, model, reference, _ = built
    text = model.load_text(dtype="float32", device="cpu")
    batch = batch_of(model, None, [Given(parts=((7,),))])
    assert tuple(batch.lengths) == (1,)
    assert cosines(vectors(model, text, batch), reference.vector([7])[None])[0] >= BARS["float32"]


def test_the_library_that_the_files_are_for_gives_the_same(path: Path, found: np.ndarray) -> None:
    """``sentence-transformers`` reads ``is_causal``, the modules and the prompts itself."""
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(path), device="cpu", model_kwargs={"torch_dtype": torch.float32})
    names = {Role.QUERY: "query", Role.PASSAGE: "document", Role.NONE: None}
    assert {name: theirs.prompts[name] for name in ("query", "document")} == {
        "query": PREFIXES["query"],
        "document": PREFIXES["passage"],
    }
    expected = [theirs.encode("".join(map(str, each.parts)), prompt_name=names[each.role]) for each in CASES]
    assert cosines(found, np.stack(expected)).min() >= BARS["float32"]


@pytest.fixture(scope="module")
def path(written: WriteCheckpoint) -> Path:
    return written(TINY, dtype="bfloat16")


@pytest.fixture(scope="module")
def found(path: Path) -> np.ndarray:
    """Our vectors of ``CASES``, to be compared with references that make a mistake."""
    return PARITY.found(Nemotron3Embed(path, Options()))


def test_the_cases_are_far_apart(found: np.ndarray) -> None:
    assert nearest(found) < 0.99


def queries_without_their_scale(reference: Ministral3Reference) -> None:
    reference.model.config.rope_parameters["llama_4_scaling_beta"] = 0.0


def queries_scaled_by_another_context(reference: Ministral3Reference) -> None:
    reference.model.config.rope_parameters["original_max_position_embeddings"] = 32


def attention_factor_without_the_second_scale(reference: Ministral3Reference) -> None:
    reference.model.rotary_emb.attention_scaling = 0.1 * float(np.log(16)) + 1


MISTAKES: dict[str, Callable[[Any], None]] = {
    "attention to the left alone": attention_to_the_left_alone,
    "last token": last_token,
    "first token left out of the mean": first_token_left_out_of_the_mean,
    "state before the final norm": state_before_the_final_norm,
    "no mark before the text": no_first_token,
    "no prefixes": no_prefixes,
    "queries without their scale": queries_without_their_scale,
    "queries scaled by another context": queries_scaled_by_another_context,
    "rope without its scaling": plain_rope(1e6),
    "rope divided by the factor": plain_rope(1e6, divided_by=16),
    "attention factor without the second scale": attention_factor_without_the_second_scale,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_fails_the_bar(
    mistake: str, found: np.ndarray, path: Path, record_property: Record
) -> None:
    reference = Ministral3Reference(path)
    MISTAKES[mistake](reference)
    PARITY.check_mistake(mistake, reference, found, record_property, bar="float32")
