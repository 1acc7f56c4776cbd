"""Prompts for inputs whose vision rows may come from images or from tensors of any length."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial

import numpy as np

from tessera import wire
from tessera.errors import InvalidInput, TesseraError
from tessera.frontend.api.request import EmbeddingsRequest, Input
from tessera.frontend.serving.images import Visions
from tessera.models.base import Int32Array, Model, Prompt

# Shorter texts are tokenised on the event loop: handing them to a thread costs more than the work.
_INLINE_CHARACTERS = 4096


def _threads() -> int:
    """One for each processor but the event loop's, at least 2 and at most 4.

    When hundreds of requests come at once, more threads would take time from the loop.
    """
    return min(4, max(2, len(os.sched_getaffinity(0)) - 1))


class Prompter:
    """Tokenises the inputs of a request; ``max_tokens`` bounds each of them."""

    def __init__(self, model: Model, max_tokens: int) -> None:
        self._model = model
        self.max_tokens = max_tokens
        self._threads = ThreadPoolExecutor(_threads(), thread_name_prefix="tokenise")

    async def build(
        self, request: EmbeddingsRequest, visions: Sequence[Visions | TesseraError]
    ) -> list[Prompt | TesseraError]:
        """Each input's prompt, or its error: its images' own, or why it cannot be a prompt."""

        def build() -> list[Prompt | TesseraError]:
            return [self._build(request, *pair) for pair in zip(request.inputs, visions, strict=True)]

        if sum(len(entry.text) for entry in request.inputs) <= _INLINE_CHARACTERS:
            return build()
        # With the context of the request, for its spans.
        run = partial(copy_context().run, build)
        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def _build(
        self, request: EmbeddingsRequest, entry: Input, visions: Visions | TesseraError
    ) -> Prompt | TesseraError:
        if isinstance(visions, TesseraError):
            return visions
        limit = min(request.max_tokens or self.max_tokens, self.max_tokens)
        per_tile = self._model.tokens_per_tile
        # A family counts in tiles. A tensor stands in as one, whose placeholders are then multiplied.
        surplus = sum(
            vision.tokens - per_tile for vision in visions if isinstance(vision.payload, wire.Embeddings)
        )
        try:
            if surplus >= limit:
                raise InvalidInput(
                    f"{entry.param}: its embeddings alone take more than the limit of {limit} tokens",
                    param=entry.param,
                )
            prompt = self._model.prompt(
                entry.text,
                [_tiles(vision.payload) for vision in visions],
                role=entry.role,
                max_tokens=limit - surplus,
                truncate=request.truncate,
                param=entry.param,
            )
        except TesseraError as error:
            return error
        return self._stretched(prompt, visions) if surplus else prompt

    def _stretched(self, prompt: Prompt, visions: Visions) -> Prompt:
        """The prompt with as many placeholders for each tensor as it has rows."""
        index = self._model.vision_index(prompt.tokens)
        pieces: list[Int32Array] = []
        copied = placeholder = 0
        for vision in visions:
            count = _tiles(vision.payload) * self._model.tokens_per_tile
            first = int(index[placeholder])
            pieces += (
                prompt.tokens[copied:first],
                np.full(vision.tokens, prompt.tokens[first], np.int32),
            )
            copied, placeholder = first + count, placeholder + count
        tokens = np.concatenate((*pieces, prompt.tokens[copied:]))
        return Prompt(
            tokens=tokens,
            image_tokens=sum(vision.tokens for vision in visions),
            truncated=prompt.truncated,
        )


def _tiles(payload: wire.Image | wire.Embeddings) -> int:
    return payload.tiles if isinstance(payload, wire.Image) else 1
