"""From one input to the backbone's tokens.

The layout, with ``p`` the role's prefix (``"query: "``, ``"passage: "`` or nothing)::

    text            BOS  p + text
    images          BOS  p  (<img> placeholders </img>, " " between two of them)  " " + text

Runs of text between control tokens are tokenised as one string each, because a merge may join the end
of the prefix with the beginning of the text; the space after the last image stays even without text.
There is no end token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import numpy as np

from tessera.checkpoint.tokenizer import as_ids
from tessera.errors import InvalidInput
from tessera.models.base import Int32Array, Piece, Prompt, Role, Truncate
from tessera.models.llama_nemotron_vl.config import PromptConfig
from tessera.models.llama_nemotron_vl.tokenizer import TextTokenizer


@contextmanager
def _text_errors(param: str) -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{param} holds a lone surrogate at character {error.start}, which is no text", param=param
        ) from error


class PromptBuilder:
    """Builds prompts for one checkpoint; thread-safe."""

    def __init__(
        self, tokenizer: TextTokenizer, config: PromptConfig, *, tokens_per_tile: int, vocab_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens_per_tile = tokens_per_tile
        self._vocab_size = vocab_size
        self._prefixes = {
            Role.QUERY: config.query_prefix,
            Role.PASSAGE: config.passage_prefix,
            Role.NONE: "",
        }
        self._bos = as_ids([tokenizer.bos])
        self._image_start = as_ids([tokenizer.image_start])
        self._image_end = as_ids([tokenizer.image_end])
        self._heads = {role: self._head(prefix) for role, prefix in self._prefixes.items()}
        both_strip = tokenizer.strips_after_image or tokenizer.strips_before_image
        self._between = as_ids([]) if both_strip else tokenizer.plain.ids(" ")

    def build(
        self,
        text: str | Sequence[int],
        tiles: Sequence[int],
        *,
        role: Role,
        max_tokens: int,
        truncate: Truncate,
        param: str,
    ) -> Prompt:
        """See ``Model.prompt``."""
        if not isinstance(text, str):
            return self._from_ids(text, tiles, max_tokens=max_tokens, truncate=truncate, param=param)
        with _text_errors(param):
            if tiles:
                return self._with_images(
                    text, tiles, role=role, max_tokens=max_tokens, truncate=truncate, param=param
                )
            return self._text_only(text, role=role, max_tokens=max_tokens, truncate=truncate, param=param)

    def pieces(self, text: str, *, role: Role, param: str) -> list[Piece]:
        """See ``Model.pieces``."""
        whole = self._prefixes[role] + text
        with _text_errors(param):
            encoding = self._tokenizer.plain.encode(whole)
        bos = self._tokenizer.bos
        return [
            Piece(token=bos, text=self.token_text(bos)),
            *(
                Piece(token=token, text=whole[start:stop], start=start, stop=stop)
                for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
            ),
        ]

    def token_text(self, token: int) -> str:
        return self._tokenizer.plain.text_of(token)

    def _text_only(self, text: str, *, role: Role, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        if not text:
            raise InvalidInput(f"{param} is empty: it has neither text nor an image", param=param)
        prefix = self._prefixes[role]
        ids = self._tokenizer.plain.ids(prefix + text)
        length = len(ids) + 1
        if length <= max_tokens:
            return Prompt(tokens=np.concatenate((self._bos, ids)), image_tokens=0)
        _refuse_unless_truncating(length, max_tokens, truncate, param)
        # a token that spans the end of the prefix carries the first word of the text: not prefix
        offsets = self._tokenizer.plain.encode(prefix + text).offsets
        fixed = sum(1 for _ in takewhile(lambda span: span[1] <= len(prefix), offsets))
        if max_tokens < 1 + fixed + 1:
            raise InvalidInput(
                f"{param} cannot be truncated to {max_tokens} tokens:"
                f" the prompt takes {1 + fixed} tokens besides the text",
                param=param,
            )
        kept = _shorten(ids[fixed:], max_tokens - 1 - fixed, truncate)
        return Prompt(tokens=np.concatenate((self._bos, ids[:fixed], kept)), image_tokens=0, truncated=True)

    def _with_images(
        self,
        text: str,
        tiles: Sequence[int],
        *,
        role: Role,
        max_tokens: int,
        truncate: Truncate,
        param: str,
    ) -> Prompt:
        placeholders = [self._tokens_per_tile * count for count in tiles]
        image_tokens = sum(placeholders)
        head = self._heads[role]
        fixed = len(head) + image_tokens + 2 * len(tiles) + len(self._between) * (len(tiles) - 1)
        if fixed > max_tokens:  # before the placeholders are built, however many there would be
            raise InvalidInput(
                f"{param} has {len(tiles)} image(s) that take {fixed} tokens with their markers,"
                f" over the limit of {max_tokens}; images are not truncated",
                param=param,
            )
        tail_text = f" {text}"
        tail = self._tokenizer.plain.ids(
            tail_text.lstrip() if self._tokenizer.strips_after_image else tail_text
        )
        truncated = fixed + len(tail) > max_tokens
        if truncated:
            _refuse_unless_truncating(fixed + len(tail), max_tokens, truncate, param)
            tail = _shorten(tail, max_tokens - fixed, truncate)
        pieces = [head]
        for position, count in enumerate(placeholders):
            if position:
                pieces.append(self._between)
            context = np.full(count, self._tokenizer.image_context, dtype=np.int32)
            pieces += (self._image_start, context, self._image_end)
        return Prompt(tokens=np.concatenate((*pieces, tail)), image_tokens=image_tokens, truncated=truncated)

    def _from_ids(
        self, values: Sequence[int], tiles: Sequence[int], *, max_tokens: int, truncate: Truncate, param: str
    ) -> Prompt:
        if tiles:
            raise InvalidInput(f"{param} combines token ids with images; only text can be", param=param)
        if len(values) == 0:
            raise InvalidInput(f"{param} is empty: it has no token ids", param=param)
        ids = np.asarray(values)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidInput(f"{param} must be text or a flat list of integer token ids", param=param)
        outside = (ids < 0) | (ids >= self._vocab_size)
        if outside.any():
            position = int(outside.argmax())
            raise InvalidInput(
                f"{param}[{position}] is {ids[position]},"
                f" outside the vocabulary of {self._vocab_size} tokens",
                param=param,
            )
        placeholder = ids == self._tokenizer.image_context
        if placeholder.any():
            raise InvalidInput(
                f"{param}[{int(placeholder.argmax())}] is {self._tokenizer.image_context},"
                " the image placeholder, but the input has no image",
                param=param,
            )
        tokens = ids.astype(np.int32)
        if len(tokens) <= max_tokens:
            return Prompt(tokens=tokens, image_tokens=0)
        _refuse_unless_truncating(len(tokens), max_tokens, truncate, param)
        return Prompt(tokens=_shorten(tokens, max_tokens, truncate), image_tokens=0, truncated=True)

    def _head(self, prefix: str) -> Int32Array:
        """BOS and the prefix as it is tokenised right before an image."""
        text = prefix.rstrip() if self._tokenizer.strips_before_image else prefix
        return np.concatenate((self._bos, self._tokenizer.plain.ids(text)))


def _refuse_unless_truncating(length: int, max_tokens: int, truncate: Truncate, param: str) -> None:
    if truncate is Truncate.NONE:
        raise InvalidInput(
            f"{param} has {length} tokens with its prompt, over the limit of {max_tokens}; truncation is off",
            param=param,
        )


def _shorten(tokens: Int32Array, keep: int, truncate: Truncate) -> Int32Array:
    """The first or last ``keep`` tokens, as a copy that does not hold on to the rest."""
    kept = tokens[:keep] if truncate is Truncate.END else tokens[len(tokens) - keep :]
    return kept.copy()
