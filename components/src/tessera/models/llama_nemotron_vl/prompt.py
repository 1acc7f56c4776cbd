"""From one input to the backbone's tokens.

The layout, with ``p`` the role's prefix (``"query: "``, ``"passage: "`` or nothing)::

    text            BOS  p + text
    images          BOS  p  (<img> placeholders </img>, " " between two of them)  " " + text

Runs of text between control tokens are tokenised as one string each, because a merge may join the end
of the prefix with the beginning of the text; the space after the last image stays even without text.
There is no end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from tessera.checkpoint.tokenizer import as_ids
from tessera.errors import InvalidInput
from tessera.models.base import Content, ImagePlan, Int32Array, Piece, Prompt, Role, Truncate
from tessera.models.llama_nemotron_vl.config import PromptConfig
from tessera.models.llama_nemotron_vl.tokenizer import TextTokenizer
from tessera.models.prompts import (
    prompt_of_ids,
    refuse_images,
    refuse_instruction,
    refuse_unless_truncating,
    shorten,
    text_errors,
    texts_of,
    token_ids,
)


class PromptBuilder:
    """Builds prompts for one checkpoint; thread-safe."""

    def __init__(self, tokenizer: TextTokenizer, config: PromptConfig, *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
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

    def build(self, content: Content, *, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        """See ``Model.prompt``. Texts are joined as they are; images stand before them."""
        refuse_instruction(content, param=param)
        ids = token_ids(content, param=param)
        if ids is not None:
            return prompt_of_ids(
                ids,
                vocab_size=self._vocab_size,
                placeholder=self._tokenizer.image_context,
                max_tokens=max_tokens,
                truncate=truncate,
                param=param,
            )
        text, images, role = "".join(texts_of(content)), content.images, content.role
        with text_errors(param):
            if images:
                return self._with_images(
                    text, images, role=role, max_tokens=max_tokens, truncate=truncate, param=param
                )
            return self._text_only(text, role=role, max_tokens=max_tokens, truncate=truncate, param=param)

    def pieces(self, text: str, *, role: Role, param: str) -> list[Piece]:
        """See ``Model.pieces``."""
        whole = self._prefixes[role] + text
        with text_errors(param):
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
        refuse_unless_truncating(length, max_tokens, truncate, param)
        # a token that spans the end of the prefix carries the first word of the text: not prefix
        offsets = self._tokenizer.plain.encode(prefix + text).offsets
        fixed = sum(1 for _ in takewhile(lambda span: span[1] <= len(prefix), offsets))
        if max_tokens < 1 + fixed + 1:
            raise InvalidInput(
                f"{param} cannot be truncated to {max_tokens} tokens:"
                f" the prompt takes {1 + fixed} tokens besides the text",
                param=param,
            )
        kept = shorten(ids[fixed:], max_tokens - 1 - fixed, truncate)
        return Prompt(tokens=np.concatenate((self._bos, ids[:fixed], kept)), image_tokens=0, truncated=True)

    def _with_images(
        self,
        text: str,
        images: Sequence[ImagePlan],
        *,
        role: Role,
        max_tokens: int,
        truncate: Truncate,
        param: str,
    ) -> Prompt:
        image_tokens = sum(image.rows for image in images)
        head = self._heads[role]
        fixed = len(head) + image_tokens + 2 * len(images) + len(self._between) * (len(images) - 1)
        refuse_images(images, fixed, max_tokens, param)  # before placeholders are built, however many
        tail_text = f" {text}"
        tail = self._tokenizer.plain.ids(
            tail_text.lstrip() if self._tokenizer.strips_after_image else tail_text
        )
        truncated = fixed + len(tail) > max_tokens
        if truncated:
            refuse_unless_truncating(fixed + len(tail), max_tokens, truncate, param)
            tail = shorten(tail, max_tokens - fixed, truncate)
        pieces = [head]
        for position, image in enumerate(images):
            if position:
                pieces.append(self._between)
            context = np.full(image.rows, self._tokenizer.image_context, dtype=np.int32)
            pieces += (self._image_start, context, self._image_end)
        return Prompt(tokens=np.concatenate((*pieces, tail)), image_tokens=image_tokens, truncated=truncated)

    def _head(self, prefix: str) -> Int32Array:
        """BOS and the prefix as it is tokenised right before an image."""
        text = prefix.rstrip() if self._tokenizer.strips_before_image else prefix
        return np.concatenate((self._bos, self._tokenizer.plain.ids(text)))
