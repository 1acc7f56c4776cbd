"""The control tokens that a checkpoint's tokenizer puts around every text, whichever these are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer

from tessera.checkpoint.tokenizer import PlainTokenizer
from tessera.errors import CheckpointError

# An id that no vocabulary has, of the only word in the tokenizer that a post-processor is tried with.
_WORD: Final = 1 << 30
_WORD_TEXT: Final = "x"


@dataclass(frozen=True, slots=True)
class Marks:
    """The ids before and behind a text."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()


def marks_of(tokenizer: PlainTokenizer) -> Marks:
    """Return what the post-processor adds, which alone decides on it, whatever ``add_bos_token`` says.

    So it is in transformers. Raises ``CheckpointError`` for a post-processor that is none, and for a mark
    that no embedding is for.
    """
    if tokenizer.post_processor is None:
        return Marks()
    marks = _tried(tokenizer)
    for mark in (*marks.before, *marks.behind):
        if mark >= tokenizer.vocab_size:
            raise CheckpointError(
                f"{tokenizer.path}: post_processor adds the id {mark}, but vocab_size is"
                f" {tokenizer.vocab_size}"
            )
    return marks


def _tried(tokenizer: PlainTokenizer) -> Marks:
    tried: dict[str, Any] = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {_WORD_TEXT: _WORD}, "unk_token": _WORD_TEXT},
        "added_tokens": [],
        "post_processor": tokenizer.post_processor,
    }
    try:
        ids: Sequence[int] = Tokenizer.from_str(json.dumps(tried)).encode(_WORD_TEXT).ids
        place = ids.index(_WORD)
    except Exception as error:  # the binding raises bare Exception
        raise CheckpointError(f"{tokenizer.path}: post_processor is not readable: {error}") from error
    return Marks(tuple(ids[:place]), tuple(ids[place + 1 :]))
