"""Puts the frontend's pipeline in front of workers in child processes, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Final, Self

import numpy as np

from tessera.errors import (
    Overloaded,
    RequestError,
    TesseraError,
    Unavailable,
)
from tessera.frontend.api.formats import finish
from tessera.frontend.media import ImageLimits, MediaBudget, MediaLoader, MediaPolicy
from tessera.frontend.media.fetch import Fetcher
from tessera.frontend.metrics import FrontendMetrics
from tessera.frontend.request import EmbeddingsRequest, ImageSource, Input, ScoreRequest
from tessera.frontend.serving.dispatch import Call
from tessera.frontend.serving.local import LocalEmbedder
from tessera.frontend.serving.pipeline import Pipeline
from tessera.frontend.settings import Limits
from tessera.local.content import Content, ImageURL, Part
from tessera.local.description import info_of, opened
from tessera.local.messages import Load
from tessera.local.options import VectorOptions
from tessera.local.parent import Died
from tessera.local.usage import Usage
from tessera.local.vectors import Vectors, no_rows
from tessera.local.wanted import DEFAULT, Wanted
from tessera.local.workers import Workers
from tessera.models import try_out
from tessera.models.base import Model, Truncate
from tessera.rows import Rows
from tessera.settings import GIB
from tessera.tasks import Deadline
from tessera.worker.settings import WorkerSettings

# Of one call. What waits does so behind what the same caller has asked for, so it is there to end what hangs.
_SECONDS: Final = 3600.0
# Until a full engine is asked again, the first time and at most. Its queue lasts an H200 for 0.9 s.
_FULL_SECONDS: Final = 0.05
_MOST_FULL_SECONDS: Final = 0.4
# Files have been bounded where they were read, and a call's inputs by the caller.
_NO_LIMIT: Final = 64 * GIB


class _File(ImageSource, frozen=True, kw_only=True):
    """An image whose bytes are there; its ``url`` means nothing."""

    data: bytes


class _FileLoader(MediaLoader):
    """Gives each image the bytes that its input came with, or those at its URL; opens no file."""

    async def read_named(self, source: ImageSource, deadline: Deadline, budget: MediaBudget) -> bytes:
        if isinstance(source, _File):
            return source.data
        return await super().read_named(source, deadline, budget)


class Engine:
    """The workers of a card, in child processes, and their pipeline in this one."""

    def __init__(
        self,
        workers: Workers,
        model: Model,
        settings: WorkerSettings,
        options: VectorOptions,
        policy: MediaPolicy,
    ) -> None:
        limits = Limits(
            max_tokens=options.max_tokens,
            images=ImageLimits(
                max_bytes=_NO_LIMIT, max_request_bytes=_NO_LIMIT, max_pixels=settings.max_image_pixels
            ),
        )
        self._workers = workers
        self._options = options
        self._numbers = count()
        self._media = _FileLoader(policy, limits.images, fetcher=Fetcher(policy, ImageLimits()))
        local = LocalEmbedder(workers.ask, model)
        counters = FrontendMetrics().of(settings.served_model_names[0])
        self._pipeline = Pipeline(model, self._media, local, limits, counters)
        self.model = info_of(model, settings, options)

    @classmethod
    async def start(
        cls,
        loads: Sequence[Load],
        options: VectorOptions,
        died: Died,
        *,
        log: Sequence[str] = (),
        allow_private_media: bool = False,
    ) -> Self:
        """Load and warm. ``loads`` are an aggregated worker's, or an encode and an embed worker's.

        ``died`` is told when a worker can run nothing any more; ``allow_private_media`` as in ``EnginePlan``.
        Raises ``ConfigError`` and ``CheckpointError`` for what cannot run here.
        """
        policy = MediaPolicy(allow_private=allow_private_media)
        settings, model = await asyncio.to_thread(opened, loads[-1])
        await asyncio.to_thread(try_out, model)
        return cls(await Workers.start(loads, died, log), model, settings, options, policy)

    async def embed(self, contents: Sequence[Content], wanted: Wanted = DEFAULT) -> Vectors:
        """Raises ``EngineDead`` where the engine can run nothing any more."""
        if wanted.query is not None:
            return await self._score(wanted.query, contents)
        embedded: dict[int, tuple[Rows, int]] = {}
        errors: dict[int, TesseraError] = {}
        left = list(range(len(contents)))
        pause = _FULL_SECONDS
        while left:
            request = self._request([contents[index] for index in left], wanted.outputs)
            try:
                call = self._call()
                result = await self._pipeline.embed(await self._pipeline.prepare(request, call), call)
            except Overloaded:
                pause = await _paused(pause)
                continue
            except RequestError as error:
                errors |= dict.fromkeys(left, error)
                break
            rows = Rows.together([self._cut(name, found) for name, found in result.outputs.items()])
            if not result.errors and len(left) == len(contents):
                # As a rule all is well, and to take short texts apart took a fifth of the loop's time.
                return Vectors(rows=rows, tokens=result.lengths, errors={})
            full: list[int] = []
            for place, index in enumerate(left):
                failure = result.errors.get(place)
                if isinstance(failure, Overloaded):
                    full.append(index)
                elif isinstance(failure, Unavailable):
                    raise failure
                elif failure is not None:
                    errors[index] = failure
                else:
                    embedded[index] = rows.of(place), result.lengths[place]
            if full:
                pause = await _paused(pause)
            left = full
        widths = [output.width for output in self.model.asked(wanted.outputs, "outputs")]
        nothing = no_rows(1, widths), 0
        inputs = [embedded.get(index, nothing) for index in range(len(contents))]
        return Vectors(
            rows=Rows.joined([rows for rows, _ in inputs]) if inputs else no_rows(0, widths),
            tokens=[tokens for _, tokens in inputs],
            errors=errors,
        )

    def _cut(self, name: str, rows: Rows) -> Rows:
        """Return rows of an output, those of the default as wide as vectors are to be."""
        if name != self.model.outputs[0].name or rows.width == self.model.width:
            return rows
        return replace(rows, values=finish(rows.values, width=self.model.width, normalize=True))

    async def _score(self, query: Content, contents: Sequence[Content]) -> Vectors:
        """Return each content's score for the query as its one row: a reranker's logit, a cosine or a MaxSim.

        One that is too long is cut, as at the service. Where one of them fails, all do, and its place
        has the error; so has the first where it is the query's. Raises ``EngineDead`` as ``embed``.
        """
        cut = self._options.truncate
        request = ScoreRequest(
            queries=(_input(query),),
            documents=tuple(map(_input, contents)),
            truncate=Truncate.DECLARED if cut is Truncate.NONE else cut,
        )
        pause = _FULL_SECONDS
        while True:
            try:
                call = self._call()
                scores = await self._pipeline.score(await self._pipeline.prepare_scores(request, call), call)
            except Overloaded:
                pause = await _paused(pause)
            except Unavailable:
                raise
            except TesseraError as error:
                places = (place for place, content in enumerate(contents) if content.param == error.param)
                rows = no_rows(len(contents), [1])
                return Vectors(rows=rows, tokens=[0] * len(contents), errors={next(places, 0): error})
            else:
                values = scores.values[:, None]
                rows = Rows(values, np.arange(len(values) + 1), np.ones(len(values), np.float32))
                return Vectors(rows=rows, tokens=[0] * len(contents), errors={})

    async def usage(self) -> Usage:
        """Raises ``EngineDead`` as ``embed``."""
        return await self._workers.usage()

    async def close(self) -> None:
        await self._workers.close()
        await self._media.close()

    def _call(self) -> Call:
        return Call(request_id=f"{next(self._numbers)}", deadline=Deadline.after(_SECONDS))

    def _request(self, contents: Sequence[Content], outputs: tuple[str, ...]) -> EmbeddingsRequest:
        return EmbeddingsRequest(
            inputs=tuple(map(_input, contents)),
            outputs=outputs,
            truncate=self._options.truncate,
            allow_partial=True,
        )


def _input(content: Content) -> Input:
    return Input.of(
        parts=tuple([_part(part, content.param or "image") for part in content.parts if part]),
        role=content.role,
        instruction=content.instruction,
        param=content.param or "text",
    )


def _part(part: Part | ImageURL, param: str) -> str | ImageSource:
    if isinstance(part, str):
        return part
    if isinstance(part, ImageURL):
        return ImageSource(url=part.url, param=param)
    return _File(url="", param=param, data=part.data)


async def _paused(seconds: float) -> float:
    """How long to pause the next time: each time texts are made into tokens again."""
    await asyncio.sleep(seconds)
    return min(2 * seconds, _MOST_FULL_SECONDS)
