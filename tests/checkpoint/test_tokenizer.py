"""Texts whose words are known get the ids that the tokenizer gives them as a whole."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from tessera.checkpoint import tokenizer as module
from tessera.checkpoint.tokenizer import PlainTokenizer, WordCache
from tessera.checkpoint.tokenizer_class import MADE_CLASSES, OTHER_CLASSES
from tessera.errors import CheckpointError
from tessera_tools.random_checkpoint.tokenizer import byte_level_bpe

LLAMA, QWEN = sorted(module._CUT_BEFORE_SPACES, key=len, reverse=True)

# What the expressions treat differently, and what Unicode calls white space or joins with others.
PIECES = (
    *("the", "house", "word's", "I'LL", "x", "2024", "12345", "don't", "'s", "...", "?!", "—", "a1b2", "_"),
    *(" ", " ", " ", " ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028", "\x1c", "\u180e", "\u200b"),
    *("é", "e\u0301", "\u0301", "\u0338", "ﬁ", "각", "\u1112\u1161\u11ab", "漢字", "مرحبا", "🙂", "\ufeff"),
)


@pytest.fixture(params=["llama", "qwen"], scope="module")
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PlainTokenizer:
    llama = request.param == "llama"
    made = byte_level_bpe(
        size=600,
        split=LLAMA if llama else QWEN,
        control=["<s>"],
        seed=3,
        whole_words=llama,
        normalizer=None if llama else normalizers.NFC(),
    )
    path: Path = tmp_path_factory.mktemp("tokenizer")
    (path / "tokenizer.json").write_text(json.dumps(made))
    return PlainTokenizer.read(path, vocab_size=700)


def whole(tokenizer: PlainTokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return found


def test_known_words(tokenizer: PlainTokenizer) -> None:
    assert tokenizer.words is not None
    choose = random.Random(5)
    texts = ["", " ", "the", " the", "the ", "the the", "x" * 300, "the " + "x" * 300]
    for _ in range(1000):
        pieces = choose.choices(PIECES, k=choose.randint(1, 12))
        texts.append((" " if choose.random() < 0.5 else "").join(pieces))
    by_words = 0
    for text in texts * 2:
        assert tokenizer.ids(text).tolist() == whole(tokenizer, text), ascii(text)
        by_words += tokenizer.words.ids(text) is not None
    assert by_words > len(texts) // 4


def test_new_words_are_learned_some_at_a_time(tokenizer: PlainTokenizer) -> None:
    words = tokenizer.words
    assert words is not None
    text = " ".join(f"word{number}" for number in range(40))
    assert words.ids(text) is None and words.ids(text) is None
    found = words.ids(text)
    assert found is not None and found.tolist() == whole(tokenizer, text)


def test_it_begins_anew_when_it_is_full(tokenizer: PlainTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KNOWN_WORDS", 10)
    for number in range(100):
        text = f"a word{number} b"
        assert tokenizer.ids(text).tolist() == whole(tokenizer, text)
        assert tokenizer.words is not None and len(tokenizer.words._known) <= 10


def test_other_tokenizers_are_asked_for_whole_texts(tokenizer: PlainTokenizer) -> None:
    values = json.loads(tokenizer.path.read_text())
    assert WordCache.suits(values)
    for change in (
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"model": values["model"] | {"dropout": 0.1}},
        {"model": values["model"] | {"type": "Unigram"}},
    ):
        assert not WordCache.suits(values | change)
    values["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] += r"|(?<= )x"
    assert not WordCache.suits(values)


@pytest.mark.parametrize("kind", [True, False], ids=["named", "of 2020"])
@pytest.mark.parametrize("name", ["BertTokenizer", "BertTokenizerFast", None, "RobertaTokenizer"])
def test_a_vocabulary_of_another_kind_than_the_class_has_is_read(
    tmp_path: Path, name: str | None, kind: bool
) -> None:
    """As multilingual MiniLM is published: the class of BERT, or none, over XLM-RoBERTa's pieces."""
    vocab = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0), ("▁river", -2.0)]
    vocab += [(letter, -6.0) for letter in "abcdeiRrv"]
    expected = Tokenizer(models.Unigram(vocab, 3, False))
    expected.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    expected.pre_tokenizer = pre_tokenizers.Metaspace()
    values = json.loads(expected.to_str())
    if not kind:
        del values["model"]["type"]
    settings = {} if name is None else {"tokenizer_class": name}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>", **settings}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    found = PlainTokenizer.read(tmp_path, vocab_size=len(vocab))
    for text in ("river", "a  RIVER bed ", "été"):
        assert found.ids(text).tolist() == expected.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("model", [None, [], "Unigram", {}, {"type": []}, {"type": "Unigram", "vocab": 3}])
@pytest.mark.parametrize("normalizer", [None, {"type": "Sequence", "normalizers": 3}])
def test_a_model_that_is_none_is_refused(tmp_path: Path, model: Any, normalizer: Any) -> None:
    values = {"model": model, "normalizer": normalizer}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    for name in ("BertTokenizer", "XLMRobertaTokenizer"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        with pytest.raises(CheckpointError, match="tokenizer"):
            PlainTokenizer.read(tmp_path, vocab_size=10)


def test_each_class_that_makes_its_parts_is_known() -> None:
    """Those of ``transformers`` that are built upon its general class and make themselves anew."""
    import transformers

    made = set()
    for path in Path(transformers.__file__).parent.glob("models/*/tokenization_*.py"):
        for entry in ast.parse(path.read_text()).body:
            if isinstance(entry, ast.ClassDef) and "TokenizersBackend" in map(ast.unparse, entry.bases):
                names = {inner.name for inner in entry.body if isinstance(inner, ast.FunctionDef)}
                made |= {entry.name.removesuffix("Fast")} if "__init__" in names else set()
    assert len(made) > 40
    assert made <= OTHER_CLASSES | set(MADE_CLASSES)
