"""The prompts of a request: each input's tokens, with placeholders for its images."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial

from tessera.errors import InvalidInput, TesseraError
from tessera.frontend.request import EmbeddingsRequest, Image, Input, ScoreRequest
from tessera.frontend.serving.images import Visions
from tessera.models.base import Content, Model, PairLimits, PairModel, Prompt, Truncate
from tessera.models.declared import declared_of, named_prompt

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
        self._declared = declared_of(model)
        self._pairs = model if isinstance(model, PairModel) else None
        self.max_tokens = max_tokens
        self._threads = ThreadPoolExecutor(_threads(), thread_name_prefix="tokenise")

    async def build(
        self, request: EmbeddingsRequest, visions: Sequence[Visions | TesseraError]
    ) -> list[Prompt | TesseraError]:
        """Return each input's prompt, or its error: its images' own, or why it cannot be a prompt."""
        bound, truncate = min(request.max_tokens or self.max_tokens, self.max_tokens), request.truncate
        pairs = zip(request.inputs, visions, strict=True)
        return await self._run(
            lambda: [self._build(*pair, bound, truncate) for pair in pairs],
            sum([entry.size for entry in request.inputs]),
        )

    async def sides(
        self, request: ScoreRequest, visions: Sequence[Visions | TesseraError]
    ) -> list[Prompt | TesseraError]:
        """Return the prompt of each query, then of each document, each on its own; or its error."""
        bound = min(request.max_tokens or self.max_tokens, self.max_tokens)

        def build() -> list[Prompt | TesseraError]:
            prompts: list[Prompt | TesseraError] = []
            images = iter(visions)
            for side, own in (
                (request.queries, request.max_query_tokens),
                (request.documents, request.max_document_tokens),
            ):
                cut = own is not None and own < bound
                limits = (own, Truncate.END) if own is not None and cut else (bound, request.truncate)
                prompts += [self._build(entry, next(images), *limits) for entry in side]
            return prompts

        return await self._run(build, sum(entry.size for entry in (*request.queries, *request.documents)))

    async def pairs(
        self, request: ScoreRequest, visions: Sequence[Visions | TesseraError]
    ) -> list[Prompt | TesseraError]:
        """Return the prompt of each document with its query, or its error."""
        model, queries = self._pairs, request.queries
        assert model is not None
        limits = PairLimits(
            tokens=min(request.max_tokens or self.max_tokens, self.max_tokens),
            query=request.max_query_tokens,
            document=request.max_document_tokens,
            truncate=request.truncate,
        )
        sides = list(zip(queries, visions, strict=False))
        documents = list(zip(request.documents, visions[len(queries) :], strict=True))
        groups = [documents] if len(queries) == 1 else [[document] for document in documents]

        def build() -> list[Prompt | TesseraError]:
            return [
                prompt
                for (query, images), group in zip(sides, groups, strict=True)
                for prompt in _pairs(model, query, images, group, limits)
            ]

        return await self._run(build, sum(entry.size for entry in (*queries, *request.documents)))

    async def _run(
        self, build: Callable[[], list[Prompt | TesseraError]], characters: int
    ) -> list[Prompt | TesseraError]:
        if characters <= _INLINE_CHARACTERS:
            return build()
        # With the context of the request, for its spans.
        run = partial(copy_context().run, build)
        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def _build(
        self, entry: Input, visions: Visions | TesseraError, max_tokens: int, truncate: Truncate
    ) -> Prompt | TesseraError:
        if isinstance(visions, TesseraError):
            return visions
        try:
            content = _content(entry, visions) if entry.prompt_name is None else self._named(entry, visions)
            return self._model.prompt(content, max_tokens=max_tokens, truncate=truncate, param=entry.param)
        except TesseraError as error:
            return error

    def _named(self, entry: Input, visions: Visions) -> Content:
        """Return an input behind the prompt that it names; raises ``InvalidInput``."""
        assert entry.prompt_name is not None
        prompt = named_prompt(self._declared, entry.prompt_name)
        if prompt is not None and entry.instruction is not None:
            raise InvalidInput("prompt_name: contradicts instruction", param="prompt_name")
        return replace(_content(entry, visions), prompt=prompt)


def _pairs(
    model: PairModel,
    query: Input,
    images: Visions | TesseraError,
    documents: Sequence[tuple[Input, Visions | TesseraError]],
    limits: PairLimits,
) -> list[Prompt | TesseraError]:
    if isinstance(images, TesseraError):
        return [images] * len(documents)
    good = [(entry, plans) for entry, plans in documents if not isinstance(plans, TesseraError)]
    try:
        prompts = iter(
            model.pairs(
                _content(query, images),
                [_content(*document) for document in good],
                limits=limits,
                query_param=query.param,
                params=[entry.param for entry, _ in good],
            )
        )
    except TesseraError as error:
        return [error] * len(documents)
    return [plans if isinstance(plans, TesseraError) else next(prompts) for _, plans in documents]


def _content(entry: Input, visions: Visions) -> Content:
    plans = iter(visions)
    return Content(
        parts=tuple([next(plans).payload.plan if isinstance(part, Image) else part for part in entry.parts]),
        role=entry.role,
        instruction=entry.instruction,
    )
