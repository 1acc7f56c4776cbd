"""Inputs, vocabularies and pooling of encoders, against the classes of the libraries that they are for."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from tessera.models import open_model
from tessera.models.base import Model, Role
from tessera_tools.random_checkpoint.encoder import ROBERTA_TINY, TINY, EncoderSpec
from tests.models.bert.cases import CASES
from tests.models.conftest import WriteCheckpoint
from tests.models.declaring import Module, declare
from tests.models.running import Given, batch_of, cosines, vectors
from tests.models.test_parity import FAMILIES, parity_of
from tests.references.encoder import EncoderReference

pytestmark = pytest.mark.parity


BARS = FAMILIES["bert"].bars
SPECS = {**FAMILIES["bert"].configurations, **FAMILIES["xlm_roberta"].configurations}

Built = tuple[Model, EncoderReference]


@pytest.fixture(scope="module", params=SPECS)
def built(request: pytest.FixtureRequest, written: WriteCheckpoint) -> Built:
    path = written(SPECS[request.param])
    return open_model(path), EncoderReference(path)


def test_token_ids_with_padding_among_them(built: Built) -> None:
    """RoBERTa gives such a token padding's position and does not count it."""
    model, reference = built
    ids = (0, 1, 6, 2, 1, 1, 9, 0)
    text = model.load_text(dtype="float32", device="cpu")
    found = vectors(model, text, batch_of(model, None, [Given(parts=(ids,))]))
    assert cosines(found, reference.vector(list(ids))[None])[0] >= BARS["float32"]


def test_the_longest_input(built: Built) -> None:
    model, reference = built
    ids = tuple(5 + place % 1000 for place in range(model.max_tokens))
    assert model.max_tokens == 512
    text = model.load_text(dtype="float32", device="cpu")
    found = vectors(model, text, batch_of(model, None, [Given(parts=(ids,))]))
    assert cosines(found, reference.vector(list(ids))[None])[0] >= BARS["float32"]


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
    model, reference, parity = open_model(path), EncoderReference(path), parity_of("bert")
    batch = batch_of(model, None, CASES)
    assert batch.input_ids[: batch.lengths[0]].tolist() == reference.tokens(*map(str, CASES[0].parts))
    assert cosines(parity.found(model), parity.expected(reference)).min() >= BARS["float32"]


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
