"""What the prompts of all families have in common: segments, limits, refusals, token ids from the client.

A prompt is made of segments: control tokens, fixed texts, the client's texts, and images. A text between two
control tokens is tokenised as one string, because a merge may join the end of what the prompt says with the
beginning of what the client does. What is too long loses tokens of the client's texts alone: control tokens,
fixed texts and placeholders stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Final

import numpy as np

from tessera.checkpoint.tokenizer import PlainTokenizer
from tessera.errors import InvalidInput
from tessera.models.base import Content, ImagePlan, Int32Array, Piece, Prompt, Truncate


def no_text(error: UnicodeEncodeError, param: str) -> InvalidInput:
    return InvalidInput(
        f"{param} holds a lone surrogate at character {error.start}, which is no text", param=param
    )


def check_text(text: str, param: str) -> None:
    """Raise ``InvalidInput`` naming ``param`` for what is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise no_text(error, param) from error


def refuse_instruction(content: Content, *, param: str) -> None:
    """For families that take none: raises ``InvalidInput`` naming ``param``."""
    if content.instruction is not None:
        raise InvalidInput(f"{param} has an instruction, which this model does not take", param=param)


def side_text(side: Content, *, images: bool, lacking: str, param: str) -> str:
    """Return the text of one side of a pair, where a side may have ``images``.

    Raises ``InvalidInput`` naming ``param`` for what is none, with ``lacking`` of an empty one.
    """
    refuse_instruction(side, param=param)
    if side.images and not images:
        raise InvalidInput(f"{param} is an image; this model reads text alone", param=param)
    if side.token_ids is not None:
        raise InvalidInput(f"{param} has token ids; a pair is made of texts", param=param)
    if not any(side.parts):
        raise InvalidInput(f"{param} is empty: it has {lacking}", param=param)
    check_text(side.text, param)
    return side.text


def each_prompt(calls: Iterable[Callable[[], Prompt]]) -> list[Prompt | InvalidInput]:
    """Return what each call makes, or the error that it raises: that of one document is its own."""
    prompts: list[Prompt | InvalidInput] = []
    for call in calls:
        try:
            prompts.append(call())
        except InvalidInput as error:
            prompts.append(error.kept())
    return prompts


def prompt_of_ids(
    content: Content,
    vocab_size: int,
    placeholder: int | None,
    max_tokens: int,
    *,
    truncate: Truncate,
    param: str,
) -> Prompt:
    """Token ids as the client gave them; ``placeholder`` stands for a row of the images.

    Raises ``InvalidInput`` naming ``param`` for ids beside anything but images behind them, with the place of
    an id that is out of range, for another number of placeholders than there are rows, and for too many ids
    with images among them.
    """
    ids, images = content.parts[0], content.images
    if not isinstance(ids, np.ndarray) or len(content.parts) > 1 + len(images):
        raise InvalidInput(
            f"{param} combines token ids with other parts; they are the whole prompt", param=param
        )
    if not len(ids):
        raise InvalidInput(f"{param} is empty: it has no token ids", param=param)
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        position = int(outside.argmax())
        raise InvalidInput(
            f"{param}[{position}] is {ids[position]}, outside the vocabulary of {vocab_size} tokens",
            param=param,
        )
    is_placeholder = ids == placeholder
    if images and placeholder is None:
        raise InvalidInput(f"{param}: this model reads text alone, and here is an image", param=param)
    rows = sum(image.rows for image in images)
    if images and (found := int(is_placeholder.sum())) != rows:
        raise InvalidInput(
            f"{param} has {found} image placeholders, and its images become {rows} rows", param=param
        )
    if placeholder is not None and not images and is_placeholder.any():
        raise InvalidInput(
            f"{param}[{int(is_placeholder.argmax())}] is {placeholder},"
            " the image placeholder, but the input has no image",
            param=param,
        )
    tokens = ids.astype(np.int32)
    if len(tokens) <= max_tokens:
        return Prompt(tokens=tokens, image_tokens=rows)
    if images:
        truncate = Truncate.NONE
    refuse_unless_truncating(len(tokens), max_tokens, truncate, param)
    return Prompt(tokens=shorten(tokens, max_tokens, truncate), image_tokens=0, truncated=True)


def refuse_images(images: Sequence[ImagePlan], fixed: int, max_tokens: int, param: str) -> None:
    """Raise ``InvalidInput`` if images with their markers, ``fixed`` tokens, are over the limit."""
    if fixed > max_tokens:
        raise InvalidInput(
            f"{param} has {len(images)} image(s) that take {fixed} tokens with their markers,"
            f" over the limit of {max_tokens}; images are not truncated",
            param=param,
        )


def refuse_unless_truncating(length: int, max_tokens: int, truncate: Truncate, param: str) -> None:
    """Raise ``InvalidInput`` naming ``param`` when an input that is too long may not be truncated."""
    if truncate is Truncate.NONE:
        raise InvalidInput(
            f"{param} has {length} tokens with its prompt, over the limit of {max_tokens}; truncation is off"
            " (truncate)",
            param=param,
        )


def shorten(tokens: Int32Array, keep: int, truncate: Truncate) -> Int32Array:
    """The first or last ``keep`` tokens, as a copy that does not hold on to the rest."""
    kept = tokens[:keep] if truncate is Truncate.END else tokens[len(tokens) - keep :]
    return kept.copy()


_NO_IDS: Final = np.empty(0, np.int32)


@lru_cache(64)
def _control(token: int) -> Int32Array:
    return np.array([token], np.int32)


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


@dataclass(frozen=True, slots=True)
class Tokens:
    """int32 ``[n]``, made before for several prompts and never cut."""

    ids: Int32Array


Segment = int | Fixed | Tokens | Run | ImagePlan
"""A control token, a text or its tokens, or the placeholders of an image."""


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
        image_tokens = sum([image.rows for image in images])
        try:
            tokens = [self._known(segment) for segment in segments]
            if images:  # before placeholders are built, however many
                refuse_images(images, image_tokens + sum(map(len, tokens)), max_tokens, param)
            for place, segment in enumerate(segments):
                if isinstance(segment, Run):
                    tokens[place] = self._tokenizer.ids(segment.prefix + segment.text)
        except UnicodeEncodeError as error:
            raise no_text(error, param) from error
        length = image_tokens + sum(map(len, tokens))
        if not length:
            raise InvalidInput(f"{param} is empty: it has no tokens", param=param)
        truncated = length > max_tokens
        if truncated:
            refuse_unless_truncating(length, max_tokens, truncate, param)
            self._cut(segments, tokens, length, max_tokens, truncate, param)
        for place, segment in enumerate(segments) if images else ():
            if isinstance(segment, ImagePlan):
                tokens[place] = np.full(segment.rows, self._placeholder, np.int32)
        return Prompt(tokens=np.concatenate(tokens), image_tokens=image_tokens, truncated=truncated)

    def document(
        self,
        segments: Sequence[Segment],
        chunks: Sequence[str],
        *,
        max_tokens: int,
        truncate: Truncate,
        param: str,
    ) -> Prompt:
        """Tokenise a prompt of texts, each of the ``chunks`` that its only run is made of by itself.

        Raises ``InvalidInput`` as ``prompt``, naming a chunk that has no token, or is left none, and for
        chunks that are not the run's text.
        """
        (at,) = [place for place, segment in enumerate(segments) if isinstance(segment, Run)]
        whole = segments[at]
        assert isinstance(whole, Run)
        if whole.text != "".join(chunks):
            raise InvalidInput(
                f"{param}: the checkpoint's chat template writes the chunks otherwise together than alone",
                param=param,
            )
        runs = [Run("" if place else whole.prefix, chunk) for place, chunk in enumerate(chunks)]
        parts: list[Segment] = [*segments[:at], *runs, *segments[at + 1 :]]
        try:
            tokens = [
                self._tokenizer.ids(part.prefix + part.text) if isinstance(part, Run) else self._known(part)
                for part in parts
            ]
        except UnicodeEncodeError as error:
            raise no_text(error, param) from error
        length = sum(map(len, tokens))
        if truncated := length > max_tokens:
            refuse_unless_truncating(length, max_tokens, truncate, param)
            self._cut(parts, tokens, length, max_tokens, truncate, param)
        bounds = np.cumsum([0, *map(len, tokens)], dtype=np.int32)[at : at + len(chunks) + 1].copy()
        bounds[0] += self._head(parts[at], tokens[at])
        if (empty := np.flatnonzero(bounds[1:] <= bounds[:-1])).size:
            name = f"{param}[{empty[0]}]"
            raise InvalidInput(
                f"{name}: no token is left of this chunk: it has none, or they were truncated", param=name
            )
        return Prompt(tokens=np.concatenate(tokens), image_tokens=0, truncated=truncated, chunks=bounds)

    def pieces(self, segments: Sequence[Segment], *, param: str) -> list[Piece]:
        """The tokens one by one; places count the characters of all texts of the prompt."""
        pieces: list[Piece] = []
        behind = 0
        for segment in segments:
            if isinstance(segment, int):
                pieces.append(Piece(token=segment, text=self._tokenizer.text_of(segment)))
                continue
            assert not isinstance(segment, ImagePlan | Tokens), "only texts have pieces"
            text = segment.text if isinstance(segment, Fixed) else segment.prefix + segment.text
            try:
                encoding = self._tokenizer.encode(text)
            except UnicodeEncodeError as error:
                raise no_text(error, param) from error
            pieces += (
                Piece(token=token, text=text[start:stop], start=behind + start, stop=behind + stop)
                for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
            )
            behind += len(text)
        return pieces

    def _known(self, segment: Segment) -> Int32Array:
        """The ids of a segment that is never cut, none for the others and for images."""
        if isinstance(segment, int):
            return _control(segment)
        if isinstance(segment, Tokens):
            return segment.ids
        if isinstance(segment, Fixed):
            short = len(segment.text) <= _CACHED_CHARACTERS
            return self._cached(segment.text) if short else self._tokenizer.ids(segment.text)
        return _NO_IDS

    def _cut(
        self,
        segments: Sequence[Segment],
        tokens: list[Int32Array],
        length: int,
        max_tokens: int,
        truncate: Truncate,
        param: str,
    ) -> None:
        """Take tokens off the ends or the beginnings of the runs, behind their prefixes.

        Raises ``InvalidInput`` naming ``param`` where nothing is left of them, and there is no image.
        """
        runs = [place for place, segment in enumerate(segments) if isinstance(segment, Run)]
        heads = {place: self._head(segments[place], tokens[place]) for place in runs}
        besides = length - sum(len(tokens[place]) - heads[place] for place in runs)
        keep = max_tokens - besides
        if keep < (not any(isinstance(segment, ImagePlan) for segment in segments)):
            raise InvalidInput(
                f"{param} cannot be truncated to {max_tokens} tokens:"
                f" the prompt takes {besides} tokens besides the text",
                param=param,
            )
        for place in runs if truncate is Truncate.END else reversed(runs):
            ids, head = tokens[place], heads[place]
            room = min(keep, len(ids) - head)
            tokens[place] = np.concatenate((ids[:head], shorten(ids[head:], room, truncate)))
            keep -= room

    def _head(self, run: Segment, ids: Int32Array) -> int:
        """How many tokens of a run are its prefix: one that reaches into the text is not."""
        assert isinstance(run, Run)
        if not run.prefix:
            return 0
        offsets = self._tokenizer.encode(run.prefix + run.text).offsets
        return sum(1 for _ in takewhile(lambda span: span[1] <= len(run.prefix), offsets))
