"""Logits of pairs against transformers' own classes reading the same files, and with likely mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from tessera.errors import ConfigError, InvalidInput
from tessera.models.base import Prompt, Truncate
from tessera_tools.random_checkpoint.distilbert import RERANK_TINY_DISTILLED
from tessera_tools.random_checkpoint.encoder import RERANK_TINY, ROBERTA_RERANK_TINY
from tessera_tools.random_checkpoint.spec import Spec
from tests.models.bert.cases import WORDS
from tests.models.changing import changed
from tests.models.conftest import WriteCheckpoint
from tests.models.llama_nemotron_rerank.cases import CASES
from tests.models.pairing import expected, logits, opened, prompts, tokens
from tests.models.running import Pair
from tests.references.encoder import CrossReference

pytestmark = pytest.mark.parity

BAR = 1e-4
SPECS: dict[str, Spec] = {
    "bert": RERANK_TINY,
    "distilbert": RERANK_TINY_DISTILLED,
    "xlm_roberta": ROBERTA_RERANK_TINY,
}


@pytest.mark.parametrize("name", SPECS)
def test_logits(written: WriteCheckpoint, name: str) -> None:
    path = written(SPECS[name])
    model, reference = opened(path), CrossReference(path)
    wanted = expected(reference, CASES)
    assert wanted.std() >= 1
    found = logits(model, CASES)
    assert np.abs(found - wanted).max() <= BAR
    alone = np.concatenate([logits(model, [pair]) for pair in CASES])
    assert np.abs(found - alone).max() <= BAR


@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_those_of_the_tokenizer(written: WriteCheckpoint, name: str) -> None:
    path = written(SPECS[name])
    model, reference = opened(path), CrossReference(path)
    for pair in CASES:
        query, document = ("".join(map(str, side.parts)) for side in (pair.query, pair.document))
        assert tokens(model, query, document) == reference.pair_tokens(query, document)


def sides_of_one_type(reference: CrossReference) -> None:
    reference.typed = False


def tanh_form_of_gelu(reference: CrossReference) -> None:
    for layer in reference.model.base_model.encoder.layer:
        layer.intermediate.intermediate_act_fn = nn.GELU(approximate="tanh")


def document_first(reference: CrossReference) -> None:
    whole = reference.answer
    reference.answer = lambda pair: whole(Pair(query=pair.document, document=pair.query))  # type: ignore[method-assign]


def no_tanh_before_the_head(reference: CrossReference) -> None:
    reference.model.bert.pooler.activation = nn.Identity()


def tanh_before_relu(reference: CrossReference) -> None:
    reference.model.pre_classifier = nn.Sequential(reference.model.pre_classifier, nn.Tanh())


def activation_applied(reference: CrossReference) -> None:
    whole = reference.answer
    reference.answer = lambda pair: 1 / (1 + np.exp(-whole(pair)))  # type: ignore[method-assign]


def positions_from_the_next_row(reference: CrossReference) -> None:
    table = reference.model.base_model.embeddings.position_embeddings.weight
    table.data = table.data.roll(-1, 0)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("bert", sides_of_one_type),
        ("bert", tanh_form_of_gelu),
        ("bert", document_first),
        ("bert", no_tanh_before_the_head),
        ("bert", activation_applied),
        ("bert", positions_from_the_next_row),
        ("distilbert", tanh_before_relu),
        ("distilbert", document_first),
        ("distilbert", positions_from_the_next_row),
        ("xlm_roberta", tanh_form_of_gelu),
        ("xlm_roberta", document_first),
        ("xlm_roberta", activation_applied),
        ("xlm_roberta", positions_from_the_next_row),
    ],
)
def test_a_mistake_fails_the_bar(
    written: WriteCheckpoint, name: str, mistake: Callable[[CrossReference], None]
) -> None:
    path = written(SPECS[name])
    reference = CrossReference(path)
    mistake(reference)
    assert np.abs(logits(opened(path), CASES) - expected(reference, CASES)).max() > BAR


@pytest.mark.parametrize("name", SPECS)
def test_a_pair_that_is_too_long(written: WriteCheckpoint, name: str) -> None:
    model = opened(written(SPECS[name]))
    whole, last = tokens(model, "river", WORDS), tokens(model, "river", "river")[-1]
    head = len(tokens(model, "river", "river")) - 2
    most = head + 5 + 1
    # The query has fewer tokens than half of what there is room for.
    assert tokens(model, "river", WORDS, tokens=most, truncate=Truncate.END) == [*whole[: head + 5], last]
    start = tokens(model, "river", WORDS, tokens=most, truncate=Truncate.START)
    assert start == [*whole[:head], *whole[-6:]]
    short, long = prompts(model, "river", "river", WORDS, tokens=most)
    assert isinstance(short, Prompt) and not short.truncated
    assert isinstance(long, InvalidInput)
    assert long.param == "documents[1]" and "truncation is off" in long.message
    bounded = prompts(model, WORDS, WORDS, query=3, document=4)
    assert isinstance(bounded[0], Prompt) and bounded[0].truncated
    assert len(bounded[0].tokens) == head - 1 + 3 + 4 + 1
    with pytest.raises(InvalidInput, match=r"query takes .* no room for a document within the limit of 4"):
        prompts(model, "river", "a", tokens=4, truncate=Truncate.END)


@pytest.mark.parametrize("name", SPECS)
def test_the_longer_side_is_cut_as_the_tokenizer_cuts_it(written: WriteCheckpoint, name: str) -> None:
    path = written(SPECS[name])
    model, reference = opened(path), CrossReference(path)
    sides = ["a", "river bridge", WORDS, WORDS * 2]
    for direction, truncate in (("right", Truncate.END), ("left", Truncate.START)):
        for limit in (7, 8, 12, 13, 21, 40):
            reference.tokenizer.enable_truncation(limit, strategy="longest_first", direction=direction)
            for query in sides:
                given = prompts(model, query, *sides, tokens=limit, truncate=truncate)
                for document, prompt in zip(sides, given, strict=True):
                    assert isinstance(prompt, Prompt)
                    assert prompt.tokens.tolist() == reference.pair_tokens(query, document)
                    whole = tokens(model, query, document)
                    assert prompt.truncated == (len(whole) > limit)


IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("config", "general", "options", "activation"),
    [
        ({}, {}, {}, "sigmoid"),
        ({"sbert_ce_default_activation_function": IDENTITY}, {}, {}, "identity"),
        ({"sentence_transformers": {"activation_fn": IDENTITY}}, {}, {}, "identity"),
        (
            {
                "sentence_transformers": {"activation_fn": SIGMOID},
                "sbert_ce_default_activation_function": IDENTITY,
            },
            {},
            {},
            "sigmoid",
        ),
        ({"sentence_transformers": {"activation_fn": SIGMOID}}, {"activation_fn": IDENTITY}, {}, "identity"),
        ({"sbert_ce_default_activation_function": IDENTITY}, {}, {"activation": "sigmoid"}, "sigmoid"),
        ({}, {}, {"activation": "identity"}, "identity"),
    ],
)
def test_the_activation_by_its_precedence(
    written: WriteCheckpoint,
    tmp_path: Path,
    config: dict[str, Any],
    general: dict[str, Any],
    options: dict[str, Any],
    activation: str,
) -> None:
    path = changed(written(ROBERTA_RERANK_TINY), tmp_path / "changed", **config)
    if general:
        (path / "config_sentence_transformers.json").write_text(json.dumps(general))
        # The reference does not read that file without this one.
        first = {"name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
        (path / "modules.json").write_text(json.dumps([first]))
    model = opened(path, **options)
    assert model.output.activation == activation
    # What an engine gives is the logit in any case.
    assert np.abs(logits(model, CASES[:2]) - expected(CrossReference(path), CASES)[:2]).max() <= BAR


@pytest.mark.parametrize("name", SPECS)
def test_nothing_is_compiled_of_it(written: WriteCheckpoint, name: str) -> None:
    model: Any = opened(written(SPECS[name]))
    with pytest.raises(ConfigError, match=f"{model.family} offers no stages to compile or export"):
        model.load_stage("text", layout="padded", dtype="float32", device="cpu")
