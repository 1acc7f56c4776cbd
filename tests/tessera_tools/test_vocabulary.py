"""A random checkpoint takes the vocabulary that a package carries, and keeps the family's own tokens."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tessera.checkpoint.tokenizer import TOKENIZER_FILE
from tessera.errors import ConfigError
from tessera.models import open_model
from tessera_tools.random_checkpoint import vocabulary
from tessera_tools.random_checkpoint.checkpoint import AUTO, main, write_checkpoint
from tessera_tools.random_checkpoint.encoder import TINY as ENCODER
from tessera_tools.random_checkpoint.llama import SIZES as LLAMA
from tessera_tools.random_checkpoint.qwen3 import RERANK_TINY
from tessera_tools.random_checkpoint.vocabulary import with_published
from tests import minilm

FILE = "llama_models/llama3/tokenizer.model"
WORDS = [b"he", b"hel", b"lo", b"hello", b"ye", b"yes", b"no"]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a vocabulary of 2,000 tokens, which count as the published ones of that size."""
    tokens = [bytes([byte]) for byte in range(256)] + WORDS
    tokens += [b"h" + bytes([65 + at // 26, 65 + at % 26]) for at in range(26 * 26)]
    tokens += [bytes([65 + at // 676, 65 + at // 26 % 26, 65 + at % 26]) for at in range(2000 - len(tokens))]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    path = tmp_path / "packages" / "lib" / "python3.11" / "site-packages" / FILE
    path.parent.mkdir(parents=True)
    path.write_text("".join(lines))
    published = {("BPE", 2000): vocabulary._PUBLISHED["BPE", 128_000]}
    monkeypatch.setattr(vocabulary, "_PUBLISHED", published)
    return tmp_path / "packages"


def test_words_are_cut_by_the_published_tokens(small: Path, tmp_path: Path) -> None:
    made = {name: tmp_path / name for name in ("plain", "published")}
    assert write_checkpoint(made["plain"], LLAMA.tiny) == ""
    assert write_checkpoint(made["published"], LLAMA.tiny, vocabulary=str(small)) == "Llama 3"
    before, after = (Tokenizer.from_file(str(path / TOKENIZER_FILE)) for path in made.values())
    assert after.encode("hello<|eot_id|>").ids == [2000, 256 + WORDS.index(b"hello"), 2000 + 9]
    assert before.encode("hello").ids != after.encode("hello").ids
    assert before.get_vocab_size() == after.get_vocab_size()
    assert before.token_to_id("<|eot_id|>") == after.token_to_id("<|eot_id|>")
    assert open_model(made["published"]).vocab_size == open_model(made["plain"]).vocab_size


def test_a_score_is_of_the_published_answers(small: Path) -> None:
    spec = replace(RERANK_TINY, layout="modules")
    files, _ = with_published(spec.files("float32", 0), small)
    vocab = files[TOKENIZER_FILE]["model"]["vocab"]
    answers = {"true_token_id": vocab["yes"], "false_token_id": vocab["no"]}
    assert files["1_LogitScore/config.json"] == answers
    assert answers["true_token_id"] == 256 + WORDS.index(b"yes")


def test_berts_is_the_published_one(tmp_path: Path) -> None:
    directory = minilm.directory()
    spec = replace(ENCODER, hidden=16, layers=1, vocab_size=30_522)
    assert write_checkpoint(tmp_path / "model", spec, vocabulary=AUTO) == "BERT"
    ours, theirs = open_model(tmp_path / "model"), open_model(directory)
    assert ours.vocab_size == theirs.vocab_size
    texts = ["Unaffable, naïve: 東京!", "[CLS] a [MASK]"]
    made, real = (Tokenizer.from_file(str(path / TOKENIZER_FILE)) for path in (tmp_path / "model", directory))
    for text in texts:
        assert made.encode(text).ids == real.encode(text).ids


def test_nothing_changes_where_it_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = LLAMA.tiny.files("float32", 0)
    assert with_published(files, None) == (files, "")
    assert with_published(files, tmp_path) == (files, "")  # none of this size is published
    vocabularies = {("BPE", 2000): vocabulary._PUBLISHED["BPE", 128_000]}
    monkeypatch.setattr(vocabulary, "_PUBLISHED", vocabularies)
    with pytest.raises(ConfigError, match=rf"--vocabulary: {tmp_path} has no package with {FILE}"):
        with_published(files, tmp_path)


def test_the_command_says_which_it_has(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--family", "llama_nemotron_embed", "--out"]
    main([*command, str(tmp_path / "one"), "--vocabulary", str(small)])
    assert "Llama 3's vocabulary" in capsys.readouterr().out
    main([*command, str(tmp_path / "two")])
    assert "made-up vocabulary" in capsys.readouterr().out
    missing = tmp_path / "nothing"
    file = next(small.rglob("tokenizer.model"))
    file.unlink()
    with pytest.raises(SystemExit):
        main([*command, str(tmp_path / "three"), "--vocabulary", str(missing)])
    assert str(missing) in capsys.readouterr().err and not (tmp_path / "three").exists()
