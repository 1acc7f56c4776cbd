"""Prompts made of segments: control tokens, fixed texts, the client's texts, and images.

A text between two control tokens is tokenised as one string, because a merge may join the end of what the
prompt says with the beginning of what the client does. What is too long loses tokens of the client's texts
alone: control tokens, fixed texts and placeholders stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Final

import numpy as np

from tessera.checkpoint.tokenizer import PlainTokenizer
from tessera.errors import InvalidInput
from tessera.models.base import ImagePlan, Int32Array, Piece, Prompt, Truncate
from tessera.models.prompts import refuse_images, refuse_unless_truncating, shorten, text_errors

_CACHED_TEXTS: Final = 256
_CACHED_CHARACTERS: Final = 1024


@dataclass(frozen=True, slots=True)
class Fixed:
    """A text that is never cut."""

    text: str


@dataclass(frozen=True, slots=True)
class Run:
    """What the client wrote, behind a ``prefix`` that is never cut."""

    prefix: str
    text: str


Segment = int | Fixed | Run | ImagePlan
"""A control token, a text, or the placeholders of an image."""


class Assembler:
    """Builds prompts of segments for one checkpoint; thread-safe.

    ``placeholder`` is the token that stands for a vision row, None for a family without images.
    """

    def __init__(self, tokenizer: PlainTokenizer, placeholder: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._placeholder = placeholder
        self._cached = lru_cache(_CACHED_TEXTS)(tokenizer.ids)

    def prompt(
        self, segments: Sequence[Segment], *, max_tokens: int, truncate: Truncate, param: str
    ) -> Prompt:
        """Tokenise; raises ``InvalidInput`` naming ``param`` for what is too long and may not be cut."""
        images = [segment for segment in segments if isinstance(segment, ImagePlan)]
        image_tokens = sum(image.rows for image in images)
        with text_errors(param):
            known = [self._known(segment) for segment in segments]
            fixed = image_tokens + sum(map(len, known))
            if images:  # before placeholders are built, however many
                refuse_images(images, fixed, max_tokens, param)
            parts = {
                place: self._tokenizer.ids(segment.prefix + segment.text)
                for place, segment in enumerate(segments)
                if isinstance(segment, Run)
            }
        length = fixed + sum(map(len, parts.values()))
        truncated = length > max_tokens
        if truncated:
            refuse_unless_truncating(length, max_tokens, truncate, param)
            heads = {place: self._head(segments[place], ids) for place, ids in parts.items()}
            besides = fixed + sum(heads.values())
            keep = max_tokens - besides
            if keep < (not images):
                raise InvalidInput(
                    f"{param} cannot be truncated to {max_tokens} tokens:"
                    f" the prompt takes {besides} tokens besides the text",
                    param=param,
                )
            _cut(parts, heads, keep, truncate)
        tokens = [
            self._ids(segment, known[place], parts.get(place)) for place, segment in enumerate(segments)
        ]
        return Prompt(tokens=np.concatenate(tokens), image_tokens=image_tokens, truncated=truncated)

    def pieces(self, segments: Sequence[Segment], *, param: str) -> list[Piece]:
        """The tokens one by one; places count the characters of all texts of the prompt."""
        pieces: list[Piece] = []
        behind = 0
        for segment in segments:
            if isinstance(segment, int):
                pieces.append(Piece(token=segment, text=self._tokenizer.text_of(segment)))
                continue
            assert not isinstance(segment, ImagePlan), "an image has no pieces"
            text = segment.text if isinstance(segment, Fixed) else segment.prefix + segment.text
            with text_errors(param):
                encoding = self._tokenizer.encode(text)
            pieces += (
                Piece(token=token, text=text[start:stop], start=behind + start, stop=behind + stop)
                for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
            )
            behind += len(text)
        return pieces

    def _known(self, segment: Segment) -> Int32Array:
        """The ids of a segment that is never cut, none for the others and for images."""
        if isinstance(segment, int):
            return np.array([segment], np.int32)
        if isinstance(segment, Fixed):
            short = len(segment.text) <= _CACHED_CHARACTERS
            return self._cached(segment.text) if short else self._tokenizer.ids(segment.text)
        return np.empty(0, np.int32)

    def _ids(self, segment: Segment, known: Int32Array, part: Int32Array | None) -> Int32Array:
        if isinstance(segment, ImagePlan):
            return np.full(segment.rows, self._placeholder, np.int32)
        return known if part is None else part

    def _head(self, run: Segment, ids: Int32Array) -> int:
        """How many tokens of a run are its prefix: one that reaches into the text is not."""
        assert isinstance(run, Run)
        if not run.prefix:
            return 0
        offsets = self._tokenizer.encode(run.prefix + run.text).offsets
        return sum(1 for _ in takewhile(lambda span: span[1] <= len(run.prefix), offsets))


def _cut(parts: dict[int, Int32Array], heads: dict[int, int], keep: int, truncate: Truncate) -> None:
    """Keep the first or last ``keep`` tokens of all runs, beside the prefixes."""
    order = list(parts) if truncate is Truncate.END else list(reversed(parts))
    for place in order:
        ids, head = parts[place], heads[place]
        room = min(keep, len(ids) - head)
        parts[place] = np.concatenate((ids[:head], shorten(ids[head:], room, truncate)))
        keep -= room
