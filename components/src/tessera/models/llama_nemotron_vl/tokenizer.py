"""The checkpoint's byte-level BPE, applied to text in which no special token can hide."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from tessera.checkpoint.section import Section
from tessera.errors import CheckpointError
from tessera.models.base import Int32Array
from tessera.models.llama_nemotron_vl.config import ModelConfig

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

IMAGE_START = "<img>"
IMAGE_END = "</img>"
IMAGE_CONTEXT = "<IMG_CONTEXT>"
_BOS = "<|begin_of_text|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTokenizer:
    """Text to ids, and the ids that text can never produce.

    ``plain`` is the checkpoint's tokenizer without its added tokens, so that their literal text is split
    like any other; the control ids are looked up once and inserted as numbers. Thread-safe.
    """

    plain: Tokenizer
    bos: int
    image_start: int
    image_end: int
    image_context: int
    strips_before_image: bool
    strips_after_image: bool
    added: dict[int, str]

    @classmethod
    def open(cls, directory: Path, config: ModelConfig) -> TextTokenizer:
        """Read ``tokenizer.json`` and the name of the first token from ``tokenizer_config.json``.

        Raises ``CheckpointError`` for a file that is no tokenizer, for a control token it lacks, and for
        ids that disagree with the model's configuration.
        """
        path = directory / TOKENIZER_FILE
        section = Section.read(path)
        added = _added_tokens(path, section.values)
        stripped = {**section.values, "added_tokens": [], "post_processor": None}
        stripped |= {"truncation": None, "padding": None}
        try:
            plain = Tokenizer.from_str(json.dumps(stripped))
        except Exception as error:  # the binding raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
        settings = Section.read(directory / TOKENIZER_CONFIG_FILE, optional=True)
        size = config.text.vocab_size
        if plain.get_vocab_size() > size:
            raise CheckpointError(f"{path}: {plain.get_vocab_size()} tokens, but vocab_size is {size}")
        ids = {
            name: _id_of(path, added, name, size)
            for name in (_bos_name(settings), IMAGE_START, IMAGE_END, IMAGE_CONTEXT)
        }
        if ids[IMAGE_CONTEXT] != config.prompt.image_token_id:
            raise CheckpointError(
                f"{path}: {IMAGE_CONTEXT} has id {ids[IMAGE_CONTEXT]},"
                f" but img_context_token_id is {config.prompt.image_token_id}"
            )
        return cls(
            plain=plain,
            bos=ids[_bos_name(settings)],
            image_start=ids[IMAGE_START],
            image_end=ids[IMAGE_END],
            image_context=ids[IMAGE_CONTEXT],
            strips_before_image=bool(added[IMAGE_START].get("lstrip")),
            strips_after_image=bool(added[IMAGE_END].get("rstrip")),
            added={token["id"]: name for name, token in added.items()},
        )

    def encode(self, text: str) -> Encoding:
        """Ids and character offsets of ``text``, without special tokens; raises ``UnicodeEncodeError``."""
        text.encode()  # the binding reports a lone surrogate as a TypeError that does not say what is wrong
        # The call for one text keeps the interpreter's lock, for seconds if the text is long.
        return self.plain.encode_batch([text], add_special_tokens=False)[0]

    def text_of(self, token: int) -> str:
        """The vocabulary's own spelling of a token, empty for an id it lacks."""
        return self.added.get(token) or self.plain.id_to_token(token) or ""

    def ids(self, text: str) -> Int32Array:
        """The same without the offsets, which take a third of the time."""
        text.encode()
        return as_ids(self.plain.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def as_ids(values: Sequence[int]) -> Int32Array:
    """Token ids as int32 ``[n]``."""
    return np.array(values, dtype=np.int32)


def _added_tokens(path: Path, parsed: Any) -> dict[str, dict[str, Any]]:
    added = parsed.get("added_tokens") or []
    well_formed = isinstance(added, list) and all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int
        for token in added
    )
    if not well_formed:
        raise CheckpointError(f"{path}: added_tokens must be a list of objects with content and id")
    return {token["content"]: token for token in added}


def _id_of(path: Path, added: dict[str, dict[str, Any]], name: str, vocab_size: int) -> int:
    if name not in added:
        raise CheckpointError(f"{path}: added_tokens lacks {name!r}")
    value = int(added[name]["id"])
    if not 0 <= value < vocab_size:
        raise CheckpointError(f"{path}: {name!r} has id {value}, but vocab_size is {vocab_size}")
    return value


def _bos_name(settings: Section) -> str:
    """``bos_token`` is a string, or an object that describes an added token."""
    if isinstance(settings.values.get("bos_token"), dict):
        return settings.section("bos_token").string("content")
    return settings.string("bos_token", _BOS)
