"""A checkpoint's tokenizer, applied to text in which no special token can hide."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from tessera.checkpoint.section import Section
from tessera.checkpoint.tokenizer_class import TOKENIZER_CONFIG_FILE as TOKENIZER_CONFIG_FILE
from tessera.checkpoint.tokenizer_class import replaced
from tessera.checkpoint.vocabulary import VOCABULARY_FILES, read_vocabulary, special_tokens
from tessera.errors import CheckpointError

TOKENIZER_FILE: Final = "tokenizer.json"

# One of 262,144 tokens takes 33 MB.
MOST_TOKENIZER_BYTES: Final = 128 << 20

Int32Array = npt.NDArray[np.int32]

Side = Literal["left", "right"]


# Llama 3's and Qwen's. No alternative looks behind itself, and none matches a space behind something else, so
# texts are cut between what is no white space and a single space with the same behind it, whatever stands
# on either side. What a text is normalised to, NFC, does not join anything with a space either.
_CUT_BEFORE_SPACES: Final = frozenset(
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)
_KNOWN_WORDS: Final = 1 << 17
_WORD_CHARACTERS: Final = 24
# What is longer is left to the tokenizer's call for several texts, which gives up the interpreter's lock.
_ALONE_CHARACTERS: Final = 256
_TEXT_CHARACTERS: Final = 1 << 16
# A word alone takes twice as long as within a text.
_NEW_WORDS: Final = 16


class WordCache:
    """The ids of words that were seen before, for tokenizers that cut texts before every space.

    A text of 127 words takes 240 µs to tokenise, 20 to 70 µs when its words are known. Holds at most 131,072
    words, 25 MB, and begins anew beyond that. Thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, bytes] = {}

    @staticmethod
    def suits(values: Mapping[str, Any]) -> bool:
        """Whether a ``tokenizer.json`` holds one whose ids of a text are those of its words."""
        model, cuts = values.get("model") or {}, values.get("pre_tokenizer") or {}
        if (values.get("normalizer") or {"type": "NFC"}).get("type") != "NFC" or model.get("type") != "BPE":
            return False
        if any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
            return False
        match cuts.get("pretokenizers"):
            case [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ]:
                return pattern in _CUT_BEFORE_SPACES
            case _:
                return False

    def ids(self, text: str) -> Int32Array | None:
        """int32 ``[n]``, read-only; None for a text that is long, or of many new words, or with other white
        space than single spaces between words."""
        if not text or len(text) > _TEXT_CHARACTERS:
            return None
        words = text.split()
        if " ".join(words) != text:
            return None
        # The first has no space before it, and no word has one in it.
        words[0] = f" {words[0]}"
        known = self._known
        of_words = [known.get(word) for word in words]
        new = [place for place, ids in enumerate(of_words) if ids is None]
        for place in new[:_NEW_WORDS]:
            word = words[place]
            if len(word) > _ALONE_CHARACTERS:
                return None
            alone = word[1:] if not place else f" {word}"
            ids = np.array(self._tokenizer.encode(alone, add_special_tokens=False).ids, np.int32).tobytes()
            if len(word) <= _WORD_CHARACTERS:
                if len(known) >= _KNOWN_WORDS:
                    known.clear()
                known[word] = ids
            of_words[place] = ids
        if len(new) > _NEW_WORDS:
            return None
        return np.frombuffer(b"".join(of_words), np.int32)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTokenizer:
    """Text to ids that no added token is among.

    ``tokenizer`` is the checkpoint's own without its added tokens, so that their literal text is split like
    any other. ``added`` are the entries of ``added_tokens`` by content: control tokens are looked up here
    once and inserted as ids. ``post_processor`` is the file's, None where it has none; families that take
    over what it adds to a text read it. ``changes`` is what ``tokenizer_config.json`` changes in
    ``tokenizer.json``, as JSON, else empty. ``files`` are those of a vocabulary without that
    file. ``truncation_side`` is what a text that is too long loses. Thread-safe.
    """

    path: Path
    tokenizer: Tokenizer
    added: Mapping[str, Mapping[str, Any]]
    vocab_size: int
    added_names: Mapping[int, str]
    words: WordCache | None
    post_processor: Mapping[str, Any] | None = None
    changes: str = ""
    truncation_side: Side = "right"
    files: tuple[str, ...] = ()

    @classmethod
    def read(
        cls, directory: Path, *, vocab_size: int, lower_case: bool = False, words: bool = False
    ) -> PlainTokenizer:
        """Read ``tokenizer.json``; with ``lower_case`` texts become lower case first, whatever it says.

        With ``words``, added tokens that are not special are found in texts, as words that somebody added.
        Raises ``CheckpointError`` for what is no tokenizer or too large.
        """
        section = _read(directory)
        path = section.path
        added = _added_tokens(path, section.values)
        stripped = {**section.values, "added_tokens": [], "post_processor": None}
        stripped |= {"truncation": None, "padding": None}
        kept = _words(section.values, added) if words else []
        stripped["added_tokens"] = kept
        if section.values["model"]["type"] == "Unigram":
            stripped["model"] = _without_control(section, added)
        changes = replaced(directory, section.values, token_name(directory, "unk_token", "[UNK]"))
        for part, changed in changes.items():
            stripped[part] = changed if "type" in changed else {**stripped[part], **changed}
        if lower_case:
            given = stripped.get("normalizer")
            steps = [{"type": "Lowercase"}, *([given] if given else [])]
            stripped["normalizer"] = {"type": "Sequence", "normalizers": steps}
        try:
            tokenizer = Tokenizer.from_str(json.dumps(stripped))
        except Exception as error:  # the binding raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
        for token in kept:
            if tokenizer.token_to_id(token["content"]) != token["id"]:
                raise CheckpointError(
                    f"{path}: added_tokens: {token['content']!r} cannot have the id {token['id']}"
                )
        # By the largest id, not by the number of tokens: a vocabulary that was pruned has holes.
        check_largest(path, tokenizer.get_vocab(with_added_tokens=False), vocab_size)
        check_largest(path, {name: token["id"] for name, token in added.items()}, vocab_size)
        names = {token["id"]: name for name, token in added.items()}
        return cls(
            path=path,
            tokenizer=tokenizer,
            added=added,
            vocab_size=vocab_size,
            added_names=names,
            words=WordCache(tokenizer) if WordCache.suits(stripped) else None,
            post_processor=section.values.get("post_processor"),
            changes=(json.dumps(changes, sort_keys=True) if changes else "") + " words" * bool(kept),
            truncation_side=_truncation_side(directory, section),
            files=() if path.name == TOKENIZER_FILE else VOCABULARY_FILES,
        )

    def id_of(self, name: str) -> int:
        """The id of an added token; raises ``CheckpointError`` for one that is missing or out of range."""
        if name not in self.added:
            raise CheckpointError(f"{self.path}: added_tokens lacks {name!r}")
        value = int(self.added[name]["id"])
        if not 0 <= value < self.vocab_size:
            raise CheckpointError(
                f"{self.path}: {name!r} has id {value}, but vocab_size is {self.vocab_size}"
            )
        return value

    def require(self, name: str, wanted: int, where: str) -> int:
        """As ``id_of``; raises ``CheckpointError`` for another id than the one that ``where`` has."""
        if (value := self.id_of(name)) != wanted:
            raise CheckpointError(f"{self.path}: {name} has id {value}, but {where} {wanted}")
        return value

    def find(self, name: str) -> int | None:
        """The id of an added token or of one in the vocabulary by its own spelling, None without one."""
        return self.tokenizer.token_to_id(name) if name not in self.added else self.id_of(name)

    @property
    def largest(self) -> int:
        """The largest id of all tokens, which takes milliseconds to find."""
        return max((*self.tokenizer.get_vocab(with_added_tokens=False).values(), *self.added_names))

    def encode(self, text: str) -> Encoding:
        """Ids and character offsets of ``text``, without special tokens; raises ``UnicodeEncodeError``."""
        text.encode()  # the binding reports a lone surrogate as a TypeError that does not say what is wrong
        # The call for one text keeps the interpreter's lock, for seconds if the text is long.
        return self.tokenizer.encode_batch([text], add_special_tokens=False)[0]

    def ids(self, text: str) -> Int32Array:
        """``encode`` without the offsets, which take a third of its time: int32 ``[n]``, read-only or not."""
        text.encode()
        if self.words is not None and (ids := self.words.ids(text)) is not None:
            return ids
        return np.array(self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)

    @property
    def cuts_behind_words(self) -> bool:
        """Whether no token holds a letter and a mark behind it, whatever stands around the two."""
        return self.words is not None

    def text_of(self, token: int) -> str:
        """The vocabulary's own spelling of a token, empty for an id it lacks."""
        return self.added_names.get(token) or self.tokenizer.id_to_token(token) or ""


def check_largest(path: Path, ids: Mapping[str, int], vocab_size: int) -> None:
    """Raise ``CheckpointError``, naming the token, for an id that no row of the embeddings is for."""
    name = max(ids, key=ids.__getitem__, default=None)
    if name is not None and ids[name] >= vocab_size:
        raise CheckpointError(
            f"{path}: the token {name!r} has id {ids[name]}, but vocab_size is {vocab_size}"
        )


def token_name(directory: Path, key: str, default: str = "") -> str:
    """The content of a token that the files name, such as ``bos_token``; see ``special_tokens``.

    ``default`` is of the tokenizer's class. Raises ``CheckpointError`` for a token that has neither.
    """
    if name := special_tokens(directory, {key: default})[key]:
        return name
    raise CheckpointError(
        f"{directory / TOKENIZER_CONFIG_FILE}: {key} is missing; it must name a token", param=key
    )


def side_of(settings: Section) -> Side | None:
    """Return the ``truncation_side`` of an object, None without one; raises ``CheckpointError``."""
    if not settings.has("truncation_side"):
        return None
    return cast(Side, settings.string("truncation_side", among=get_args(Side)))


def _truncation_side(directory: Path, section: Section) -> Side:
    """Return the side that the settings have, or else the file itself, as the reference reads them."""
    settings = Section.read(directory / TOKENIZER_CONFIG_FILE, optional=True)
    if (side := side_of(settings)) is not None:
        return side
    truncation = section.section("truncation") if section.has("truncation") else None
    if truncation is not None and truncation.string("direction", "Right", among=("Left", "Right")) == "Left":
        return "left"
    return "right"


def _read(directory: Path) -> Section:
    """Return the values of ``tokenizer.json``, or those made of the files of a vocabulary."""
    path = directory / TOKENIZER_FILE
    if path.exists():
        section = Section.read(path, most_bytes=MOST_TOKENIZER_BYTES)
        model = section.section("model").values
        return replace(section, values={**section.values, "model": {"type": _kind(model), **model}})
    made = read_vocabulary(directory)
    if made is None:
        raise CheckpointError(
            f"{path}: there is no such file; AutoTokenizer of transformers writes it with save_pretrained"
        )
    return made


def _kind(model: Mapping[str, Any]) -> str:
    """Return the kind of a model by its keys, as ``tokenizers`` does for files of 2020 without ``type``."""
    if "merges" in model:
        return "BPE"
    if isinstance(model.get("vocab"), list):
        return "Unigram"
    return "WordPiece" if "continuing_subword_prefix" in model else "WordLevel"


def _words(values: Mapping[str, Any], added: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the added tokens that are words, with what no text can hold in place of the others.

    The library numbers those behind the vocabulary itself, one after another.
    """
    vocabulary = (values.get("model") or {}).get("vocab") or ()
    kept: list[Mapping[str, Any]] = []
    for name, token in sorted(added.items(), key=lambda item: item[1]["id"]):
        if not token.get("special"):
            kept.append(token)
        elif token["id"] >= len(vocabulary):
            kept.append({**token, "content": f"{name}{uuid4().hex}"})
    return kept if any(not token.get("special") for token in kept) else []


def _without_control(section: Section, added: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the model of a ``tokenizer.json`` in whose texts no added token is looked for.

    Unigram's vocabulary has the control tokens, with the best score of all, and so would make them of a
    text that spells them. Pieces have no space, so that one with a space occurs in no text.
    """
    model = section.section("model").values
    pieces = model.get("vocab")
    if not isinstance(pieces, list) or not all(isinstance(entry, list) and entry for entry in pieces):
        raise section.error("model.vocab", "must be a list of pieces with their scores")
    controls = {name for name, token in added.items() if token.get("special")}
    vocab = [[f" {entry[0]}", *entry[1:]] if entry[0] in controls else entry for entry in pieces]
    return {**model, "vocab": vocab}


def _added_tokens(path: Path, parsed: Any) -> dict[str, dict[str, Any]]:
    added = parsed.get("added_tokens") or []
    well_formed = isinstance(added, list) and all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int
        for token in added
    )
    if not well_formed:
        raise CheckpointError(f"{path}: added_tokens must be a list of objects with content and id")
    return {token["content"]: token for token in added}
