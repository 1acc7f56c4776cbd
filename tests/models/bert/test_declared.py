"""What only encoders' files declare of texts: lengths by role, cases of letters, prompts of pairs.

The reference is ``sentence-transformers`` on the same directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.engine.batch import PackedInput, pack
from tessera.errors import CheckpointError, InvalidInput
from tessera.models import open_model
from tessera.models.base import Content, Model, Prompt, Role, Truncate, truncation_of
from tessera_tools.random_checkpoint.encoder import (
    RERANK_TINY,
    ROBERTA_RERANK_TINY,
    ROBERTA_TINY,
    TINY,
    EncoderSpec,
)
from tests.models.conftest import WriteCheckpoint
from tests.models.declaring import Module, declare, dense, nest, write
from tests.models.pairing import logits
from tests.models.running import Given, Pair, cosines, vectors

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="needs sentence-transformers 6.2"),
]

TEXTS = [
    "river",
    "été naïve 東京",
    "The Old Bridge by the TEMPLE. " * 4,
    "a market in the light of morning " * 12,
]
POOLED = Module("Pooling", {"embedding_dimension": TINY.hidden, "pooling_mode": "mean"})
BAR = 1 - 1e-9


def prompt(model: Model, text: str, role: Role, truncate: Truncate = Truncate.END) -> Prompt:
    content = Content(parts=(text,), role=role)
    return model.prompt(content, max_tokens=model.max_tokens, truncate=truncate, param="input")


def embedded(model: Model, role: Role = Role.NONE, truncate: Truncate = Truncate.END) -> np.ndarray:
    inputs = []
    for text in TEXTS:
        tokens = prompt(model, text, role, truncation_of(model, truncate)).tokens
        inputs.append(
            PackedInput(
                tokens=tokens,
                positions=model.positions(tokens, ()),
                vision_index=model.vision_index(tokens),
            )
        )
    return vectors(model, model.load_text(dtype="float32", device="cpu"), pack(inputs))


def check(path: Path, roles: Sequence[Role] = (Role.NONE,), truncate: Truncate = Truncate.END) -> None:
    from sentence_transformers import SentenceTransformer

    # Which alone makes the activations of transformers.
    reference = SentenceTransformer(str(path), device="cpu", trust_remote_code=True)
    model = open_model(path)
    encode = {Role.NONE: "encode", Role.QUERY: "encode_query", Role.PASSAGE: "encode_document"}
    for role in roles:
        expected = getattr(reference, encode[role])(TEXTS, normalize_embeddings=True)
        assert cosines(embedded(model, role, truncate), expected).min() >= BAR, role


@pytest.mark.parametrize(
    ("lengths", "most"),
    [
        ({"query_length": 16, "document_length": 24}, 512),
        ({"max_seq_length": 32, "document_length": 48}, 48),
        ({"max_seq_length": 32, "tokenizer_args": {"model_max_length": 20}}, 20),
        ({"processor_kwargs": {"model_max_length": 24, "padding_side": "right"}}, 24),
    ],
)
def test_an_input_is_as_long_as_its_role_may_have_it(
    lengths: Mapping[str, Any], most: int, written: WriteCheckpoint, tmp_path: Path
) -> None:
    path = declare(written(TINY), tmp_path / "declared", POOLED, sentence_bert_config=lengths)
    check(path, list(Role))
    model = open_model(path)
    assert model.max_tokens == most
    longest = {role: len(prompt(model, TEXTS[-1], role).tokens) for role in Role}
    shortest = min(longest, key=longest.__getitem__)
    with pytest.raises(InvalidInput, match=rf"input .*{longest[shortest]}"):
        prompt(model, TEXTS[-1], shortest, Truncate.NONE)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"processing_kwargs": {"text": {"add_special_tokens": False}}}, "text.add_special_tokens is False"),
        (
            {"processing_kwargs": {"add_special_tokens": False}},
            "processing_kwargs.add_special_tokens is False",
        ),
        (
            {"processing_kwargs": {"text": {"truncation_side": "left"}}},
            "text.truncation_side is 'left'",
        ),
        ({"processor_kwargs": {"do_lower_case": False}}, "processor_kwargs.do_lower_case is False"),
    ],
)
def test_arguments_that_change_texts_are_refused_by_key(
    changes: Mapping[str, Any], complaint: str, written: WriteCheckpoint, tmp_path: Path
) -> None:
    path = declare(written(TINY), tmp_path / "declared", POOLED, sentence_bert_config=changes)
    with pytest.raises(
        CheckpointError, match=rf"sentence_bert_config\.json: \S*{complaint}, which is not done"
    ):
        open_model(path)


def test_an_argument_that_repeats_a_setting_of_the_tokenizer_changes_nothing(
    written: WriteCheckpoint, tmp_path: Path
) -> None:
    source, same = written(TINY), {"do_lower_case": False, "strip_accents": True}
    configured = json.loads((source / "tokenizer_config.json").read_text())
    settings = configured | {"tokenizer_class": "BertTokenizer", **same}
    files = {"sentence_bert_config": {"tokenizer_args": same}, "tokenizer_config": settings}
    check(declare(source, tmp_path / "declared", POOLED, **files))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"config_args": {"num_hidden_layers": 1}},
            "config_args.num_hidden_layers is 1, and config.json has 3",
        ),
        ({"model_kwargs": {"num_labels": 2}}, "model_kwargs.num_labels is 2, an argument that is not read"),
        (
            {"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}},
            "modality_config.text.method_output_name must be one of",
        ),
        ({"tokenizer_name_or_path": "other"}, "tokenizer_name_or_path names another tokenizer"),
    ],
)
def test_arguments_that_make_another_model_are_refused_by_key(
    changes: Mapping[str, Any], complaint: str, written: WriteCheckpoint, tmp_path: Path
) -> None:
    path = declare(written(TINY), tmp_path / "declared", POOLED, sentence_bert_config=changes)
    with pytest.raises(CheckpointError, match=rf"sentence_bert_config\.json: {complaint}"):
        open_model(path)


@pytest.mark.parametrize("spec", [TINY, ROBERTA_TINY], ids=["bert", "xlm_roberta"])
def test_a_transformer_may_have_a_folder_of_its_own(
    spec: EncoderSpec, written: WriteCheckpoint, tmp_path: Path
) -> None:
    pooled = Module("Pooling", {"word_embedding_dimension": spec.hidden, "pooling_mode_cls_token": True})
    flat = declare(
        written(spec),
        tmp_path / "flat",
        pooled,
        dense(spec.hidden, 48),
        sentence_bert_config={"max_seq_length": 24},
        config_sentence_transformers={"prompts": {"query": "the long river "}},
    )
    path = nest(declare(flat, tmp_path / "nested", pooled, dense(spec.hidden, 48)))
    assert not (path / "config.json").exists()
    check(path, list(Role))
    model = open_model(path)
    assert np.array_equal(embedded(model, Role.QUERY), embedded(open_model(flat), Role.QUERY))
    assert (model.path, model.max_tokens) == (path / "0_Transformer", 24)
    assert open_model(model.path).fingerprint == model.fingerprint
    shutil.copytree(path, tmp_path / "linked")
    (tmp_path / "linked" / "0_Transformer").rename(tmp_path / "linked" / "weights")
    (tmp_path / "linked" / "0_Transformer").symlink_to("weights")
    assert open_model(tmp_path / "linked").fingerprint == model.fingerprint
    write(path / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    assert open_model(path).fingerprint != model.fingerprint


def test_a_folder_without_a_configuration_is_refused_by_its_place(
    written: WriteCheckpoint, tmp_path: Path
) -> None:
    path = nest(declare(written(TINY), tmp_path / "nested", POOLED))
    (path / "0_Transformer" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"0_Transformer/config\.json: there is no such file"):
        open_model(path)


def test_modules_come_in_the_order_of_the_list(written: WriteCheckpoint, tmp_path: Path) -> None:
    """Whatever ``idx`` says; of one name the last counts, in the place of the first."""
    modules = (POOLED, dense(TINY.hidden, 64), dense(64, 48, seed=1), dense(TINY.hidden, 64, seed=2))
    path = declare(written(TINY), tmp_path / "declared", *modules)
    entries = json.loads((path / "modules.json").read_text())
    for place, entry in enumerate(reversed(entries)):
        entry["idx"] = place
    entries[4]["name"] = entries[2]["name"]
    write(path / "modules.json", entries)
    check(path)
    model = open_model(path)
    assert [step.folder.name for step in model.declared.dense] == ["4_Dense", "3_Dense"]


@pytest.mark.parametrize(
    "activation",
    ["torch.nn.modules.activation.LeakyReLU", "transformers.activations.NewGELUActivation"],
)
def test_a_product_has_its_activation(activation: str, written: WriteCheckpoint, tmp_path: Path) -> None:
    product = dense(TINY.hidden, 48, activation_function=activation)
    check(declare(written(TINY), tmp_path / "declared", POOLED, product))


LEFT = {"direction": "Left", "max_length": 64, "strategy": "LongestFirst", "stride": 0}


@pytest.mark.parametrize(
    ("settings", "of_file", "arguments", "side"),
    [
        ({}, None, {}, Truncate.END),
        ({"truncation_side": "left"}, None, {}, Truncate.START),
        ({}, LEFT, {}, Truncate.START),
        ({"truncation_side": "right"}, LEFT, {}, Truncate.END),
        ({"truncation_side": "left"}, None, {"tokenizer_args": {"truncation_side": "right"}}, Truncate.END),
        ({}, None, {"processor_kwargs": {"truncation_side": "left"}}, Truncate.START),
        (
            {"truncation_side": "left"},
            None,
            {"processing_kwargs": {"text": {"max_length": 12}}},
            Truncate.START,
        ),
    ],
)
def test_a_text_loses_the_side_that_is_declared(
    settings: Mapping[str, Any],
    of_file: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
    side: Truncate,
    written: WriteCheckpoint,
    tmp_path: Path,
) -> None:
    source = written(TINY)
    path = declare(
        source,
        tmp_path / "declared",
        POOLED,
        sentence_bert_config={"max_seq_length": 24, **arguments},
        tokenizer_config=json.loads((source / "tokenizer_config.json").read_text()) | settings,
        tokenizer=json.loads((source / "tokenizer.json").read_text()) | {"truncation": of_file},
    )
    assert truncation_of(open_model(path), Truncate.DECLARED) is side
    check(path, truncate=Truncate.DECLARED)


CLS_ALONE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}},
}


@pytest.mark.parametrize("processor", [{}, {"post_processor": None}, {"post_processor": CLS_ALONE}])
@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config": {"cls_token": "[MASK]"}},
        {"special_tokens_map": {"cls_token": "[MASK]"}},
        {"special_tokens_map": {"sep_token": {"content": "[PAD]"}}},
    ],
)
@pytest.mark.parametrize("name", ["BertTokenizer", "PreTrainedTokenizerFast"])
def test_what_stands_around_a_text_is_as_the_class_of_the_tokenizer_has_it(
    name: str,
    files: Mapping[str, Mapping[str, Any]],
    processor: Mapping[str, Any],
    written: WriteCheckpoint,
    tmp_path: Path,
) -> None:
    """The classes of encoders go by the names of their tokens, the general one by the file."""
    source = written(TINY)
    configured = json.loads((source / "tokenizer_config.json").read_text()) | {"tokenizer_class": name}
    path = declare(
        source,
        tmp_path / "declared",
        POOLED,
        tokenizer=json.loads((source / "tokenizer.json").read_text()) | dict(processor),
        **{**files, "tokenizer_config": configured | files.get("tokenizer_config", {})},
    )
    check(path)


@pytest.mark.parametrize("normalized", [True, False])
def test_words_that_were_added_are_found_in_texts(
    normalized: bool, written: WriteCheckpoint, tmp_path: Path
) -> None:
    """Special ones are not, and keep their numbers."""
    source = written(TINY)
    of_tokenizer = json.loads((source / "tokenizer.json").read_text())
    size = len(of_tokenizer["model"]["vocab"])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized}
    for place, (name, special) in enumerate([("<secret>", True), ("the bridge", False), ("e of m", False)]):
        of_tokenizer["added_tokens"].append(
            {"id": size + place, "content": name, "special": special, **plain}
        )
    for name in list(of_tokenizer["model"]["vocab"])[-4:]:
        # Room among the rows that the weights have.
        del of_tokenizer["model"]["vocab"][name]
    for place, token in enumerate(of_tokenizer["added_tokens"][-3:]):
        token["id"] = size - 4 + place
    path = declare(source, tmp_path / "declared", POOLED, tokenizer=of_tokenizer)
    check(path)
    model = open_model(path)
    tokens = prompt(model, "under the bridge <secret> e of m", Role.NONE).tokens.tolist()
    assert size - 3 in tokens and size - 2 in tokens and size - 4 not in tokens


def test_an_input_without_a_token_is_empty(written: WriteCheckpoint, tmp_path: Path) -> None:
    source = written(TINY)
    without = json.loads((source / "tokenizer.json").read_text()) | {"post_processor": None}
    path = declare(source, tmp_path / "declared", POOLED, tokenizer=without)
    with pytest.raises(InvalidInput, match="input is empty: it has no tokens"):
        prompt(open_model(path), " ", Role.NONE)


@pytest.mark.parametrize("spec", [RERANK_TINY, ROBERTA_RERANK_TINY], ids=["bert", "xlm_roberta"])
def test_a_pair_that_is_joined_in_another_way_is_refused(
    spec: EncoderSpec, written: WriteCheckpoint, tmp_path: Path
) -> None:
    source = written(spec)
    of_tokenizer = json.loads((source / "tokenizer.json").read_text())
    ends = of_tokenizer["post_processor"]
    (first, begin), (last, end) = ends["cls"], ends["sep"]
    before, text, behind = {"SpecialToken": {"id": first, "type_id": 0}}, "Sequence", last
    marks = [before, {text: {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": behind, "type_id": 0}}]
    joined = {
        "type": "TemplateProcessing",
        "single": marks,
        "pair": [*marks[:2], {text: {"id": "B", "type_id": 1}}, marks[2]],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]}
            for name, number in ((first, begin), (last, end))
        },
    }
    path = declare(source, tmp_path / "joined", tokenizer=of_tokenizer | {"post_processor": joined})
    with pytest.raises(CheckpointError, match="post_processor joins a pair by"):
        open_model(path)
    path = declare(source, tmp_path / "none", tokenizer=of_tokenizer | {"post_processor": None})
    with pytest.raises(CheckpointError, match="needs one token on either side"):
        open_model(path)


def test_only_modules_json_lets_the_file_of_the_transformer_count(
    written: WriteCheckpoint, tmp_path: Path
) -> None:
    path = declare(written(TINY), tmp_path / "declared", POOLED, sentence_bert_config={"max_seq_length": 16})
    (path / "modules.json").unlink()
    check(path)


def test_arguments_that_change_nothing_are_no_matter(written: WriteCheckpoint, tmp_path: Path) -> None:
    usual = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
        "processing_kwargs": {"text": {"add_special_tokens": True}},
        "tokenizer_args": {"padding_side": "right"},
    }
    check(declare(written(TINY), tmp_path / "declared", POOLED, sentence_bert_config=usual))


@pytest.mark.parametrize(
    "settings", [{"do_lower_case": False}, {"do_lower_case": True}, {"strip_accents": False}, {}]
)
@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("name", ["BertTokenizer", "PreTrainedTokenizerFast"])
def test_letters_are_as_the_configuration_of_the_tokenizer_has_them(
    name: str, lowercase: bool, settings: Mapping[str, Any], written: WriteCheckpoint, tmp_path: Path
) -> None:
    """The class of BERT's goes by its settings, the general one by the file of the tokenizer."""
    path = declare(written(TINY), tmp_path / "declared", POOLED)
    of_tokenizer = json.loads((path / "tokenizer.json").read_text())
    of_tokenizer["normalizer"] = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": lowercase,
    }
    write(path / "tokenizer.json", of_tokenizer)
    configured = json.loads((path / "tokenizer_config.json").read_text())
    write(path / "tokenizer_config.json", configured | {"tokenizer_class": name, **settings})
    check(path)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("spec", [RERANK_TINY, ROBERTA_RERANK_TINY], ids=["bert", "xlm_roberta"])
def test_the_default_prompt_of_pairs_stands_before_the_query(
    spec: EncoderSpec, nested: bool, written: WriteCheckpoint, tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder

    general = {"prompts": {"web": "which river is "}, "default_prompt_name": "web"}
    old = declare(written(spec), tmp_path / "old")
    if not spec.roberta:
        # The general class of the reference gives tokens no types.
        configured = json.loads((old / "tokenizer_config.json").read_text())
        write(old / "tokenizer_config.json", configured | {"tokenizer_class": "BertTokenizer"})
    CrossEncoder(str(old), device="cpu").save_pretrained(str(tmp_path / "new"))
    path = tmp_path / "new"
    declared = json.loads((path / "config_sentence_transformers.json").read_text())
    write(path / "config_sentence_transformers.json", declared | general)
    if nested:
        nest(path)
    pairs = [("long", "the river under the bridge"), ("old", "a market by the temple " * 9)]
    model: Any = open_model(path)
    found = logits(
        model, [Pair(query=Given(parts=(query,)), document=Given(parts=(text,))) for query, text in pairs]
    )
    expected = CrossEncoder(str(path), device="cpu").predict(pairs)
    scores = found[:, 0] if model.activation == "identity" else 1 / (1 + np.exp(-found[:, 0]))
    assert np.abs(scores - expected).max() <= 1e-5
    without = CrossEncoder(str(old), device="cpu").predict(pairs)
    assert np.abs(without - expected).max() > 1e-3


def test_a_cross_encoder_whose_tokenizer_names_no_token_types_has_none(
    written: WriteCheckpoint, tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder

    source = written(RERANK_TINY)
    settings = json.loads((source / "tokenizer_config.json").read_text()) | {
        "tokenizer_class": "BertTokenizer"
    }
    pairs = [("long", "the river under the bridge"), ("old", "a market by the temple " * 9)]
    given = [Pair(query=Given(parts=(query,)), document=Given(parts=(text,))) for query, text in pairs]
    found = {}
    for name, inputs in (
        ("none", ["input_ids", "attention_mask"]),
        ("typed", ["input_ids", "token_type_ids", "attention_mask"]),
    ):
        configured = settings | {"model_input_names": inputs}
        path = declare(source, tmp_path / name, tokenizer_config=configured)
        found[name] = logits(open_model(path), given)[:, 0]
        reference = CrossEncoder(str(path), device="cpu")
        expected = reference.predict(pairs, activation_fn=torch.nn.Identity())
        assert np.abs(found[name] - expected).max() <= 1e-5, name
    assert np.abs(found["none"] - found["typed"]).max() > 1e-3
