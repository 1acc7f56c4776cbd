"""Vectors against transformers' own classes reading the same files, and against likely mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch import nn

from tessera.models import open_model
from tessera.models.base import Model, Role
from tessera_tools.random_checkpoint.distilbert import TINY_DISTILLED
from tessera_tools.random_checkpoint.encoder import ROBERTA_TINY, TINY, EncoderSpec
from tessera_tools.random_checkpoint.spec import Spec
from tests.models.bert.cases import CASES
from tests.models.conftest import WriteCheckpoint
from tests.models.declaring import Module, declare
from tests.models.parity import Parity, Record, check_tokens, no_last_token
from tests.models.running import Given, batch_of, company, cosines, nearest, vectors
from tests.references.encoder import EncoderReference

pytestmark = pytest.mark.parity

# The tanh form of GELU, the smallest of the mistakes, leaves 1.3e-8 of a cosine; the right one 2e-13.
BARS = {"float32": 1 - 1e-9, "bfloat16": 0.998}
PARITY = Parity(title="encoders", cases=CASES, bars=BARS)
CONFIGURATIONS: dict[str, Spec] = {
    "bert": TINY,
    "bert. before names, shards": replace(TINY, layers=2, prefix="bert.", shards=2),
    "bert, one token type": replace(TINY, types=1, heads=8),
    "distilbert": TINY_DISTILLED,
    "distilbert. before names": replace(TINY_DISTILLED, prefix="distilbert."),
    "xlm-roberta": ROBERTA_TINY,
    "roberta. before names": replace(ROBERTA_TINY, prefix="roberta.", hidden=64),
}

Built = tuple[str, Model, EncoderReference, np.ndarray]
"""The configuration, the model, its reference and the reference's vectors of ``CASES``."""


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def built(request: pytest.FixtureRequest, written: WriteCheckpoint) -> Built:
    path = written(CONFIGURATIONS[request.param])
    reference = EncoderReference(path)
    return request.param, open_model(path), reference, PARITY.expected(reference)


@pytest.mark.parametrize("dtype", BARS)
def test_vectors(built: Built, dtype: str, record_property: Record) -> None:
    name, model, reference, expected = built
    batch = batch_of(model, None, CASES)
    check_tokens(batch, CASES, lambda text, _: reference.tokens(text))
    assert max(batch.lengths) > 200
    PARITY.check(name, model, expected, dtype, record_property)


def test_company_changes_nothing(built: Built) -> None:
    _, model, *_ = built
    assert company(model, CASES) >= 0.999999


def test_token_ids_with_padding_among_them(built: Built) -> None:
    """RoBERTa gives such a token padding's position and does not count it."""
    _, model, reference, _ = built
    ids = (0, 1, 6, 2, 1, 1, 9, 0)
    text = model.load_text(dtype="float32", device="cpu")
    found = vectors(model, text, batch_of(model, None, [Given(parts=(ids,))]))
    assert cosines(found, reference.vector(list(ids))[None])[0] >= BARS["float32"]


def test_the_longest_input(built: Built) -> None:
    _, model, reference, _ = built
    ids = tuple(5 + place % 1000 for place in range(model.max_tokens))
    assert model.max_tokens == 512
    text = model.load_text(dtype="float32", device="cpu")
    found = vectors(model, text, batch_of(model, None, [Given(parts=(ids,))]))
    assert cosines(found, reference.vector(list(ids))[None])[0] >= BARS["float32"]


def test_the_cases_are_far_apart(built: Built) -> None:
    *_, expected = built
    assert nearest(expected) < 0.98


def positions_from_the_next_row(reference: EncoderReference) -> None:
    table = reference.model.embeddings.position_embeddings.weight
    table.data = table.data.roll(-1, 0)


def tanh_form_of_gelu(reference: EncoderReference) -> None:
    for layer in reference.model.encoder.layer:
        layer.intermediate.intermediate_act_fn = nn.GELU(approximate="tanh")


def no_token_type(reference: EncoderReference) -> None:
    reference.model.embeddings.token_type_embeddings.weight.data.zero_()


def another_epsilon(reference: EncoderReference) -> None:
    for module in reference.model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 0.1


def first_token(reference: EncoderReference) -> None:
    reference.pool = lambda hidden: hidden[0]  # type: ignore[method-assign]


def control_tokens_left_out_of_the_mean(reference: EncoderReference) -> None:
    reference.pool = lambda hidden: hidden[1:-1].mean(0)  # type: ignore[method-assign]


@pytest.mark.parametrize("spec", [TINY, ROBERTA_TINY], ids=["bert", "xlm_roberta"])
@pytest.mark.parametrize(
    "mistake",
    [
        positions_from_the_next_row,
        tanh_form_of_gelu,
        no_token_type,
        another_epsilon,
        first_token,
        control_tokens_left_out_of_the_mean,
        no_last_token,
    ],
)
def test_a_mistake_fails_the_bar(
    mistake: Callable[[EncoderReference], None],
    spec: EncoderSpec,
    written: WriteCheckpoint,
    record_property: Record,
) -> None:
    path = written(spec)
    reference = EncoderReference(path)
    mistake(reference)
    found = PARITY.found(open_model(path))
    PARITY.check_mistake(mistake.__name__, reference, found, record_property, bar="float32")


def byte_level(path: Path) -> None:
    """Give a checkpoint a vocabulary of bytes and their merges, as RoBERTa's English ones have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["".join(filter(lambda part: isinstance(part, str), given.parts)) for given in CASES], trainer
    )
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    (path / "tokenizer.json").unlink()
    tokenizer.save(str(path / "tokenizer.json"))


@pytest.mark.parametrize(
    ("changes", "vocabulary"),
    [
        ({"model_type": "roberta", "architectures": ["RobertaModel"]}, byte_level),
        ({"model_type": "camembert", "architectures": ["CamembertModel"]}, None),
        ({"hidden_act": "gelu_new"}, None),
        ({"hidden_act": "relu"}, None),
    ],
    ids=["roberta", "camembert", "tanh form of gelu", "relu"],
)
def test_kin_of_xlm_roberta(
    changes: dict[str, Any],
    vocabulary: Callable[[Path], None] | None,
    written: WriteCheckpoint,
    tmp_path: Path,
) -> None:
    path = declare(written(ROBERTA_TINY), tmp_path / "kin", config=changes)
    if vocabulary is not None:
        vocabulary(path)
    model, reference = open_model(path), EncoderReference(path)
    batch = batch_of(model, None, CASES)
    assert batch.input_ids[: batch.lengths[0]].tolist() == reference.tokens(*map(str, CASES[0].parts))
    assert cosines(PARITY.found(model), PARITY.expected(reference)).min() >= BARS["float32"]


SENTENCES = ["river", "the bridge by the old temple", "a market in the light " * 9, "été naïve 東京"]
MODES = ["mean", "max", "weightedmean", "mean_sqrt_len_tokens", ["cls", "mean"]]
PROMPTS = {"query": "query: ", "document": "passage: the ", "long": "query: what is "}


@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="needs sentence-transformers 6.2")
@pytest.mark.parametrize(("spec", "mode"), [*((TINY, mode) for mode in MODES), (ROBERTA_TINY, "mean")])
def test_prompts_that_are_left_out_of_pooling(
    spec: EncoderSpec, mode: str | list[str], written: WriteCheckpoint, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    config = {"embedding_dimension": spec.hidden, "pooling_mode": mode, "include_prompt": False}
    path = declare(
        written(spec),
        tmp_path / "declared",
        Module("Pooling", config),
        config_sentence_transformers={"prompts": PROMPTS},
    )
    reference, model = SentenceTransformer(str(path), device="cpu"), open_model(path)
    text = model.load_text(dtype="float32", device="cpu")
    given, expected = [], []
    for role, encode in ((Role.QUERY, reference.encode_query), (Role.PASSAGE, reference.encode_document)):
        given += [Given(parts=(sentence,), role=role) for sentence in SENTENCES]
        expected.append(encode(SENTENCES, batch_size=1))
    given += [Given(parts=(sentence,)) for sentence in SENTENCES]
    expected.append(reference.encode(SENTENCES, batch_size=1))
    given += [Given(parts=(PROMPTS["long"] + sentence,)) for sentence in SENTENCES]
    expected.append(reference.encode(SENTENCES, prompt_name="long", batch_size=1))
    found = vectors(model, text, batch_of(model, None, given))
    assert cosines(found, np.concatenate(expected)).min() >= BARS["float32"]
    assert model.positions(np.zeros(1, np.int32), ()).shape == (3, 1)
