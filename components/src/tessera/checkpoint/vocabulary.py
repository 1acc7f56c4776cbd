"""Makes what ``tokenizer.json`` would hold of the vocabulary files of the years before it.

The kinds are those that ``transformers`` 5.23 makes of the same files: BERT's ``vocab.txt``, and RoBERTa's
``vocab.json`` with ``merges.txt``. Pieces of SentencePiece are not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece

from tessera.checkpoint.section import Section
from tessera.checkpoint.tokenizer_class import BERT_CLASSES, TOKENIZER_CONFIG_FILE, tokenizer_class
from tessera.errors import CheckpointError
from tessera.small_files import read_regular

SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
ADDED_TOKENS_FILE: Final = "added_tokens.json"
WORDS_FILE: Final = "vocab.txt"
BPE_FILES: Final = ("vocab.json", "merges.txt")
VOCABULARY_FILES: Final = (WORDS_FILE, *BPE_FILES)
"""The files of vocabularies, of which a checkpoint with a ``tokenizer.json`` needs none."""

PIECES_FILES: Final = ("sentencepiece.bpe.model", "spiece.model", "tokenizer.model")

_ROBERTA: Final = ("RobertaTokenizer",)
_OF_BERT: Final = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_OF_ROBERTA: Final = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "mask_token": "<mask>",
}
_MOST_BYTES: Final = 64 << 20


def special_tokens(directory: Path, defaults: Mapping[str, str]) -> dict[str, str]:
    """Return the contents of control tokens by what they are for, such as ``cls_token``.

    ``special_tokens_map.json`` wins over a ``tokenizer_config.json`` without ``added_tokens_decoder``, and
    both over the ``defaults``. Raises ``CheckpointError`` for a value of another form.
    """
    settings = Section.read(directory / TOKENIZER_CONFIG_FILE, optional=True)
    sections = [settings]
    if not settings.has("added_tokens_decoder"):
        sections.insert(0, Section.read(directory / SPECIAL_TOKENS_FILE, optional=True))
    found = dict(defaults)
    for name in defaults:
        section = next((section for section in sections if section.has(name)), None)
        if section is not None:
            found[name] = _content(section, name)
    return found


def read_vocabulary(directory: Path) -> Section | None:
    """Return the values of a ``tokenizer.json`` made of a checkpoint's vocabulary files, None without any.

    The section names the first of the files. Raises ``CheckpointError`` for files that are none, and for a
    class of tokenizers that is not made of them.
    """
    there = [name for name in (*VOCABULARY_FILES, *PIECES_FILES) if (directory / name).exists()]
    if not there:
        return None
    name = tokenizer_class(directory)
    if name in BERT_CLASSES and WORDS_FILE in there:
        return _words(directory / WORDS_FILE, special_tokens(directory, _OF_BERT))
    if name in _ROBERTA and set(BPE_FILES) <= set(there):
        return _merges(directory, special_tokens(directory, _OF_ROBERTA))
    kind = f"for the class {name}" if name else "where no class is named"
    raise CheckpointError(
        f"{directory}: has {', '.join(there)} and no tokenizer.json; {kind} it"
        " is not made here. AutoTokenizer of transformers makes it, and save_pretrained writes it"
    )


def _words(path: Path, special: Mapping[str, str]) -> Section:
    """Read one word a line; the settings of the normaliser are the class's, which the caller looks at."""
    _check(path)
    try:
        words = WordPiece.read_file(str(path))
        tokenizer = Tokenizer(WordPiece(words, unk_token=special["unk_token"]))
    except Exception as error:  # the binding raises bare Exception
        raise CheckpointError(f"{path}: no list of words: {error}") from error
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _section(path, tokenizer, words, special)


def _merges(directory: Path, special: Mapping[str, str]) -> Section:
    vocabulary, merges = (directory / name for name in BPE_FILES)
    for path in (vocabulary, merges):
        _check(path)
    try:
        words, pairs = BPE.read_file(str(vocabulary), str(merges))
        model = BPE(words, pairs, continuing_subword_prefix="", end_of_word_suffix="")
    except Exception as error:  # the binding raises bare Exception
        raise CheckpointError(f"{vocabulary}: no vocabulary with {merges.name}: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _section(vocabulary, tokenizer, words, special)


def _section(
    path: Path, tokenizer: Tokenizer, words: Mapping[str, int], special: Mapping[str, str]
) -> Section:
    """Return the values with the tokens that the files add, a control token only with an id."""
    values: dict[str, Any] = json.loads(tokenizer.to_str())
    ids = dict(_added(path.parent))
    for name in special.values():
        if name not in ids and name in words:
            ids[name] = words[name]
    controls = frozenset(special.values())
    values["added_tokens"] = [
        {
            "id": number,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": name not in controls,
            "special": name in controls,
        }
        for name, number in sorted(ids.items(), key=lambda item: item[1])
    ]
    return Section(path=path, values=values)


def _added(directory: Path) -> Iterator[tuple[str, int]]:
    """Yield the tokens that the files add by number, and their numbers."""
    settings = Section.read(directory / TOKENIZER_CONFIG_FILE, optional=True)
    if settings.has("added_tokens_decoder"):
        listed = settings.section("added_tokens_decoder")
        for number in listed.values:
            if not number.isdecimal():
                raise listed.error(number, "is no id of a token")
            yield _content(listed, number), int(number)
        return
    added = Section.read(directory / ADDED_TOKENS_FILE, optional=True)
    for name in added.values:
        yield name, added.integer(name, at_least=0)


def _content(section: Section, key: str) -> str:
    """Return a token, which is a string, or an object that describes one."""
    if isinstance(section.values[key], dict):
        return section.section(key).string("content")
    return section.string(key)


def _check(path: Path) -> None:
    """Raise ``CheckpointError`` for what is no regular file of a vocabulary's size."""
    try:
        read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: not readable: {error}") from error
