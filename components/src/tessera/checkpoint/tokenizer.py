"""A checkpoint's tokenizer, applied to text in which no special token can hide."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from tessera.checkpoint.section import Section
from tessera.errors import CheckpointError

TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTokenizer:
    """Text to ids that no added token is among.

    ``tokenizer`` is the checkpoint's own without its added tokens, so that their literal text is split like
    any other. ``added`` are the entries of ``added_tokens`` by content: control tokens are looked up here
    once and inserted as ids. Thread-safe.
    """

    path: Path
    tokenizer: Tokenizer
    added: Mapping[str, Mapping[str, Any]]
    vocab_size: int
    added_names: Mapping[int, str]

    @classmethod
    def read(cls, directory: Path, *, vocab_size: int) -> PlainTokenizer:
        """Read ``tokenizer.json``; raises ``CheckpointError`` for what is no tokenizer or too large."""
        path = directory / TOKENIZER_FILE
        section = Section.read(path)
        added = _added_tokens(path, section.values)
        stripped = {**section.values, "added_tokens": [], "post_processor": None}
        stripped |= {"truncation": None, "padding": None}
        try:
            tokenizer = Tokenizer.from_str(json.dumps(stripped))
        except Exception as error:  # the binding raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
        size = tokenizer.get_vocab_size()
        if size > vocab_size:
            raise CheckpointError(f"{path}: {size} tokens, but vocab_size is {vocab_size}")
        names = {token["id"]: name for name, token in added.items()}
        return cls(path=path, tokenizer=tokenizer, added=added, vocab_size=vocab_size, added_names=names)

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

    def encode(self, text: str) -> Encoding:
        """Ids and character offsets of ``text``, without special tokens; raises ``UnicodeEncodeError``."""
        text.encode()  # the binding reports a lone surrogate as a TypeError that does not say what is wrong
        # The call for one text keeps the interpreter's lock, for seconds if the text is long.
        return self.tokenizer.encode_batch([text], add_special_tokens=False)[0]

    def ids(self, text: str) -> Int32Array:
        """``encode`` without the offsets, which take a third of its time: int32 ``[n]``."""
        text.encode()
        return as_ids(self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def text_of(self, token: int) -> str:
        """The vocabulary's own spelling of a token, empty for an id it lacks."""
        return self.added_names.get(token) or self.tokenizer.id_to_token(token) or ""


def as_ids(values: Sequence[int]) -> Int32Array:
    """Token ids as int32 ``[n]``."""
    return np.array(values, dtype=np.int32)


def token_name(directory: Path, key: str, default: str) -> str:
    """The content of a token that ``tokenizer_config.json`` names, such as ``bos_token``.

    The value is a string, or an object that describes an added token.
    """
    settings = Section.read(directory / TOKENIZER_CONFIG_FILE, optional=True)
    if isinstance(settings.values.get(key), dict):
        return settings.section(key).string("content")
    return settings.string(key, default)


def _added_tokens(path: Path, parsed: Any) -> dict[str, dict[str, Any]]:
    added = parsed.get("added_tokens") or []
    well_formed = isinstance(added, list) and all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int
        for token in added
    )
    if not well_formed:
        raise CheckpointError(f"{path}: added_tokens must be a list of objects with content and id")
    return {token["content"]: token for token in added}
