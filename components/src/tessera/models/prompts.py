"""What the prompts of all families have in common: token ids from the client, limits, refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from tessera.errors import InvalidInput
from tessera.models.base import Content, ImagePlan, Int32Array, Prompt, Truncate


@contextmanager
def text_errors(param: str) -> Iterator[None]:
    """Turn a text that is none (a lone surrogate) into ``InvalidInput`` naming ``param``."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{param} holds a lone surrogate at character {error.start}, which is no text", param=param
        ) from error


def token_ids(content: Content, *, param: str) -> Sequence[int] | None:
    """The client's token ids, None for a content of texts and images.

    Raises ``InvalidInput`` naming ``param`` for ids beside anything else.
    """
    ids = [part for part in content.parts if isinstance(part, tuple)]
    if not ids:
        return None
    if len(content.parts) > 1:
        what = "images; only text can be" if content.images else "other parts; they stand alone"
        raise InvalidInput(f"{param} combines token ids with {what}", param=param)
    return ids[0]


def texts_of(content: Content) -> tuple[str, ...]:
    """The texts of a content in their order, images left out."""
    return tuple(part for part in content.parts if isinstance(part, str))


def refuse_instruction(content: Content, *, param: str) -> None:
    """For families that take none: raises ``InvalidInput`` naming ``param``."""
    if content.instruction is not None:
        raise InvalidInput(f"{param} has an instruction, which this model does not take", param=param)


def prompt_of_ids(
    values: Sequence[int],
    *,
    vocab_size: int,
    placeholder: int | None,
    max_tokens: int,
    truncate: Truncate,
    param: str,
) -> Prompt:
    """Token ids as the client gave them; ``placeholder`` stands for a vision row and may not be among them.

    Raises ``InvalidInput`` naming ``param``, with the place of an id that is out of range.
    """
    if len(values) == 0:
        raise InvalidInput(f"{param} is empty: it has no token ids", param=param)
    ids = np.asarray(values)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidInput(f"{param} must be text or a flat list of integer token ids", param=param)
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        position = int(outside.argmax())
        raise InvalidInput(
            f"{param}[{position}] is {ids[position]}, outside the vocabulary of {vocab_size} tokens",
            param=param,
        )
    is_placeholder = ids == placeholder
    if placeholder is not None and is_placeholder.any():
        raise InvalidInput(
            f"{param}[{int(is_placeholder.argmax())}] is {placeholder},"
            " the image placeholder, but the input has no image",
            param=param,
        )
    tokens = ids.astype(np.int32)
    if len(tokens) <= max_tokens:
        return Prompt(tokens=tokens, image_tokens=0)
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
            f"{param} has {length} tokens with its prompt, over the limit of {max_tokens}; truncation is off",
            param=param,
        )


def shorten(tokens: Int32Array, keep: int, truncate: Truncate) -> Int32Array:
    """The first or last ``keep`` tokens, as a copy that does not hold on to the rest."""
    kept = tokens[:keep] if truncate is Truncate.END else tokens[len(tokens) - keep :]
    return kept.copy()
