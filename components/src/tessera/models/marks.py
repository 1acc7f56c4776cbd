"""The control tokens that a checkpoint's tokenizer puts around every text, whichever these are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
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
    before, behind = _tried(tokenizer, 1)
    return Marks(before, behind)


def pair_marks_of(tokenizer: PlainTokenizer) -> tuple[Marks, tuple[int, ...]]:
    """Return what the post-processor adds around two texts, and between them; raises as ``marks_of``."""
    before, between, behind = _tried(tokenizer, 2)
    return Marks(before, behind), between


def _tried(tokenizer: PlainTokenizer, texts: int) -> list[tuple[int, ...]]:
    """Return the ids before, between and behind one or two texts, each as often as there are places."""
    if tokenizer.post_processor is None:
        return [()] * (texts + 1)
    tried: dict[str, Any] = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {_WORD_TEXT: _WORD}, "unk_token": _WORD_TEXT},
        "added_tokens": [],
        "post_processor": tokenizer.post_processor,
    }
    try:
        second = _WORD_TEXT if texts == 2 else None
        ids: list[int] = Tokenizer.from_str(json.dumps(tried)).encode(_WORD_TEXT, second).ids
        places = [place for place, number in enumerate(ids) if number == _WORD]
        if len(places) != texts:
            raise ValueError(f"it makes {len(places)} texts of {texts}")
    except Exception as error:  # the binding raises bare Exception
        raise CheckpointError(f"{tokenizer.path}: post_processor is not readable: {error}") from error
    for mark in ids:
        if mark != _WORD and mark >= tokenizer.vocab_size:
            raise CheckpointError(
                f"{tokenizer.path}: post_processor adds the id {mark}, but vocab_size is"
                f" {tokenizer.vocab_size}"
            )
    return [tuple(ids[start + 1 : stop]) for start, stop in pairwise((-1, *places, len(ids)))]
