"""What an encoder's files say: prompts, pooling, names of tensors, the longest input, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tessera.checkpoint import tokenizer_class as tokenizer_module
from tessera.checkpoint.tokenizer import PlainTokenizer
from tessera.errors import ConfigError
from tessera.models import open_model
from tessera.models.base import Content, Model, Role, Truncate
from tessera_tools.random_checkpoint.encoder import (
    ROBERTA_TINY,
    TINY,
    EncoderSpec,
)
from tests.models.bert.cases import CASES
from tests.models.changing import changed, edit
from tests.models.conftest import WriteCheckpoint
from tests.models.running import batch_of, cosines, vectors


def tokens(model: Model, text: str, role: Role = Role.NONE, most: int = 512) -> list[int]:
    content = Content(parts=(text,), role=role)
    return list(model.prompt(content, max_tokens=most, truncate=Truncate.END, param="x").tokens.tolist())


@pytest.fixture
def copied(written: WriteCheckpoint, tmp_path: Path) -> Path:
    return changed(written(TINY), tmp_path / "copied")


@pytest.mark.parametrize("spec", [TINY, ROBERTA_TINY], ids=["bert", "xlm_roberta"])
def test_prompts_by_role(written: WriteCheckpoint, spec: EncoderSpec) -> None:
    model = open_model(written(spec))
    assert tokens(model, "river", Role.QUERY) == tokens(model, "query: river")
    assert tokens(model, "river", Role.PASSAGE) == tokens(model, "passage: river")
    assert tokens(model, "river", Role.QUERY) != tokens(model, "river")
    named = open_model(written(spec), {"query_prompt": "the "})
    assert tokens(named, "river", Role.QUERY) == tokens(model, "the river")


def test_a_text_that_is_too_long_keeps_its_prompt_and_its_end(written: WriteCheckpoint) -> None:
    model = open_model(written(TINY))
    whole = tokens(model, "river under the bridge by the old temple", Role.QUERY)
    cut = tokens(model, "river under the bridge by the old temple", Role.QUERY, most=len(whole) - 2)
    assert cut == [*whole[:-3], whole[-1]]


@pytest.mark.parametrize("spec", [TINY, ROBERTA_TINY], ids=["bert", "xlm_roberta"])
@pytest.mark.parametrize("text", ["[SEP]", "a [CLS] b", "</s>", "<s>x</s>", "<mask>", "[MASK][PAD]", "<pad>"])
def test_control_tokens_that_a_text_spells_are_text(
    written: WriteCheckpoint, spec: EncoderSpec, text: str
) -> None:
    model = open_model(written(spec))
    unknown = 3 if spec.roberta else 1
    inside = set(tokens(model, text)[1:-1])
    assert inside and not inside & ({*range(5), spec.vocab_size - 1} - {unknown, 4 if spec.roberta else 1})


def test_declared_lower_case(written: WriteCheckpoint, tmp_path: Path) -> None:
    path = changed(written(ROBERTA_TINY), tmp_path / "lower")
    before = tokens(open_model(path), "The RIVER")
    assert before != tokens(open_model(path), "the river")
    (path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    assert tokens(open_model(path), "The RIVER") == tokens(open_model(path), "the river")


NO_CLASS = {"tokenizer_class": None}
OF_BERT = {"tokenizer_class": "BertTokenizer"}


@pytest.mark.parametrize(
    ("in_file", "in_config", "model_type"),
    [
        ({}, {**OF_BERT, "do_lower_case": False}, "bert"),
        ({}, {**OF_BERT, "do_lower_case": False, "strip_accents": True}, "bert"),
        ({}, {**OF_BERT, "strip_accents": False, "tokenize_chinese_chars": False}, "bert"),
        ({"lowercase": False}, OF_BERT, "bert"),
        ({"lowercase": False, "strip_accents": False}, {"tokenizer_class": "BertTokenizerFast"}, "bert"),
        ({"lowercase": False}, {"tokenizer_class": "DistilBertTokenizer"}, "distilbert"),
        ({"lowercase": False}, {"tokenizer_class": "MPNetTokenizerFast"}, "bert"),
        ({"lowercase": False}, {"tokenizer_class": "ElectraTokenizer"}, "bert"),
        ({"handle_chinese_chars": False}, NO_CLASS, "bert"),
        ({"lowercase": False}, {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": True}, "bert"),
    ],
)
def test_settings_of_the_tokenizer_win(
    copied: Path, in_file: dict[str, Any], in_config: dict[str, Any], model_type: str
) -> None:
    """As ``transformers`` has it, whose classes make what ``tokenizer.json`` says as well."""
    from transformers import AutoTokenizer

    edit(copied / "config.json", model_type=model_type)
    normalizer = json.loads((copied / "tokenizer.json").read_text())["normalizer"]
    edit(copied / "tokenizer.json", normalizer=normalizer | in_file, truncation=None, padding=None)
    edit(copied / "tokenizer_config.json", **in_config)
    tokenizer = PlainTokenizer.read(copied, vocab_size=TINY.vocab_size)
    reference = AutoTokenizer.from_pretrained(copied)
    words = ("river", "RIVER", "Bridge", "é", "É", "e\u0301", "ü", "水", "水river", "火水", "ñ")
    assert len({tuple(reference(word).input_ids) for word in words}) > 5
    for word in words:
        assert tokenizer.ids(word).tolist() == reference(word, add_special_tokens=False).input_ids, word


def test_settings_of_the_tokenizer_are_part_of_the_fingerprint(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that read them otherwise made other vectors; where the files agree, its vectors hold."""
    edit(copied / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    agreeing = open_model(copied).fingerprint
    edit(copied / "tokenizer_config.json", do_lower_case=False)
    changed = open_model(copied).fingerprint
    monkeypatch.setattr(tokenizer_module, "_BERT_PARTS", frozenset())
    assert open_model(copied).fingerprint != changed
    edit(copied / "tokenizer_config.json", do_lower_case=True)
    before = open_model(copied).fingerprint
    monkeypatch.undo()
    assert open_model(copied).fingerprint == before != agreeing


def test_the_longest_input(copied: Path) -> None:
    assert open_model(copied).max_tokens == 512
    (copied / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256}))
    assert open_model(copied).max_tokens == 256
    assert open_model(copied, {"max_tokens": 100}).max_tokens == 100
    (copied / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 4096}))
    assert open_model(copied).max_tokens == 512


def test_pooling_that_is_declared_and_that_is_not(copied: Path) -> None:
    assert open_model(copied, {"pooling": "cls"}).output.pooling == "mean"
    edit(copied / "1_Pooling/config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)
    assert open_model(copied).output.pooling == "first"
    (copied / "modules.json").unlink()
    assert open_model(copied).output.pooling == "mean"
    assert open_model(copied, {"pooling": "cls"}).output.pooling == "first"


def test_buffers_and_names_of_the_first_years(copied: Path) -> None:
    expected = computed(copied)
    stored = load_file(copied / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in stored.items()
    }
    renamed["embeddings.position_ids"] = np.arange(512, dtype=np.int64)[None]
    renamed["cls.predictions.bias"] = np.zeros(2000, np.float32)
    save_file(renamed, copied / "model.safetensors", {"format": "pt"})
    assert cosines(computed(copied), expected).min() > 0.999999


def computed(path: Path) -> np.ndarray:
    model = open_model(path)
    return vectors(model, model.load_text(dtype="float32", device="cpu"), batch_of(model, None, CASES))


def test_nothing_is_compiled_of_it(written: WriteCheckpoint) -> None:
    model: Any = open_model(written(TINY))
    with pytest.raises(ConfigError, match="family bert offers no stages to compile or export"):
        model.load_stage("text", layout="packed", dtype="float32", device="cpu")
