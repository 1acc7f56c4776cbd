"""Vocabularies without ``tokenizer.json`` give the tokens that ``transformers`` makes of the same files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from tessera.checkpoint.tokenizer import PlainTokenizer, token_name
from tessera.errors import CheckpointError
from tests import minilm

transformers: Any = pytest.importorskip("transformers")

TEXTS = [
    "",
    "Hello World, don't STOP",
    " leading and  double\tspaces\r\n",
    "Été naïve ÅNGSTRÖM ß ﬁ İstanbul",
    "Привет, мир! Ελληνικά עברית العربية",
    "東京都 と 한국어 हिन्दी ไทย",
    "🙂 a\u200bb\x00c\ufffd e\u0301",
    "[MASK] [CLS] <mask> <s>",
    "x" * 300,
]
SIZE = 60_000
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def check(path: Path, first: str, last: str) -> None:
    """Compare with ``transformers``, which is told as well that texts have no control tokens."""
    reference = transformers.AutoTokenizer.from_pretrained(str(path))
    own = PlainTokenizer.read(path, vocab_size=SIZE)
    before = own.id_of(token_name(path, "cls_token", first))
    behind = own.id_of(token_name(path, "sep_token", last))
    for text in TEXTS:
        expected = reference(text, split_special_tokens=True)["input_ids"]
        assert [before, *own.ids(text).tolist(), behind] == expected, ascii(text)


def write(path: Path, **files: Mapping[str, Any]) -> None:
    for name, values in files.items():
        (path / f"{name}.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config": {"tokenizer_class": "BertTokenizerFast"}},
        {"tokenizer_config": {"do_lower_case": False}},
        {"tokenizer_config": {"do_lower_case": False, "strip_accents": True}},
        {"tokenizer_config": {"tokenize_chinese_chars": False}},
        {"tokenizer_config": {"sep_token": "[unused1]"}},
        {"special_tokens_map": {"cls_token": "[unused2]", "sep_token": {"content": "[unused3]"}}},
        {"config": {"model_type": "distilbert"}, "added_tokens": {"covid": 30_522}},
    ],
)
def test_words(files: Mapping[str, Any], tmp_path: Path) -> None:
    shutil.copy(minilm.directory() / "vocab.txt", tmp_path)
    write(tmp_path, **{"config": {"model_type": "bert"}, **files})
    check(tmp_path, "[CLS]", "[SEP]")


@pytest.fixture(scope="module")
def merges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``vocab.json`` and ``merges.txt`` of RoBERTa's kind."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=600, special_tokens=ROBERTA, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    path = tmp_path_factory.mktemp("merges")
    tokenizer.model.save(str(path))
    return path


@pytest.mark.parametrize(
    "settings", [{}, {"add_prefix_space": True}, {"tokenizer_class": "RobertaTokenizer"}]
)
@pytest.mark.parametrize("whole", [False, True])
def test_merges(settings: Mapping[str, Any], whole: bool, merges: Path, tmp_path: Path) -> None:
    """The settings win over ``tokenizer.json`` where that is there, too."""
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(merges / name, tmp_path)
    write(tmp_path, config={"model_type": "roberta"}, tokenizer_config=settings)
    if whole:
        # Saved without the settings, or with the space that is then in the file alone.
        transformers.RobertaTokenizer(
            str(merges / "vocab.json"), str(merges / "merges.txt"), add_prefix_space=not settings
        ).backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    check(tmp_path, "<s>", "</s>")


@pytest.mark.parametrize(
    ("names", "files", "complaint"),
    [
        ([], {}, "save_pretrained"),
        (["vocab.txt"], {"tokenizer_config": {"tokenizer_class": "BertJapaneseTokenizer"}}, "BertJapanese"),
        (["vocab.txt"], {"config": {"model_type": "llama"}}, "where no class is named"),
        (["sentencepiece.bpe.model"], {"config": {"model_type": "xlm-roberta"}}, "XLMRobertaTokenizer"),
        (["vocab.json"], {"config": {"model_type": "roberta"}}, "vocab.json"),
        (
            ["vocab.json", "merges.txt"],
            {"config": {"model_type": "roberta"}},
            "no vocabulary with merges.txt",
        ),
        (["vocab.txt"], {"tokenizer_config": {"added_tokens_decoder": {"x": "y"}}}, "added_tokens_decoder.x"),
    ],
)
def test_what_is_not_made(names: list[str], files: Mapping[str, Any], complaint: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("[UNK]\nwords\n")
    write(tmp_path, **{"config": {"model_type": "bert"}, **files})
    with pytest.raises(CheckpointError, match=complaint):
        PlainTokenizer.read(tmp_path, vocab_size=SIZE)


def test_words_that_would_never_end(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").symlink_to("/dev/zero")
    write(tmp_path, config={"model_type": "bert"})
    with pytest.raises(CheckpointError, match="no regular file"):
        PlainTokenizer.read(tmp_path, vocab_size=SIZE)
