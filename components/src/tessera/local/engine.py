"""Puts the frontend's pipeline in front of workers in child processes, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from tessera.checkpoint.origin import origin
from tessera.errors import (
    ConfigError,
    Overloaded,
    RequestError,
    TesseraError,
    Unavailable,
)
from tessera.frontend.api.formats import finish
from tessera.frontend.media import ImageLimits, MediaBudget, MediaLoader, MediaPolicy
from tessera.frontend.metrics import FrontendMetrics
from tessera.frontend.request import EmbeddingsRequest, ImageSource, Input
from tessera.frontend.serving.dispatch import Call
from tessera.frontend.serving.local import LocalEmbedder
from tessera.frontend.serving.pipeline import Pipeline
from tessera.frontend.settings import Limits
from tessera.frontend.widths import Widths
from tessera.local.content import Content, ImageFile
from tessera.local.messages import Load
from tessera.local.model_info import ModelInfo
from tessera.local.options import VectorOptions
from tessera.local.parent import Died
from tessera.local.usage import Usage
from tessera.local.vectors import Vectors
from tessera.local.workers import Workers
from tessera.models import open_model
from tessera.models.base import Model, OutputKind
from tessera.settings import GIB
from tessera.tasks import Deadline
from tessera.worker.settings import WorkerSettings, parse

# Of one call. What waits does so behind what the same caller has asked for, so it is there to end what hangs.
_SECONDS: Final = 3600.0
# Until a full engine is asked again, the first time and at most. Its queue lasts an H200 for 0.9 s.
_FULL_SECONDS: Final = 0.05
_MOST_FULL_SECONDS: Final = 0.4
# Files have been bounded where they were read, and a call's inputs by the caller.
_NO_LIMIT: Final = 64 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class _File(ImageSource):
    """An image whose bytes are there; its ``url`` means nothing."""

    data: bytes


class _FileLoader(MediaLoader):
    """Gives each image the bytes that its input came with; fetches nothing and opens no file."""

    async def read_named(self, source: ImageSource, deadline: Deadline, budget: MediaBudget) -> bytes:
        assert isinstance(source, _File)
        return source.data


class Engine:
    """The workers of a card, in child processes, and their pipeline in this one."""

    def __init__(
        self, workers: Workers, model: Model, settings: WorkerSettings, options: VectorOptions
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
        self._media = _FileLoader(MediaPolicy(), limits.images)
        local = LocalEmbedder(workers.ask, model)
        counters = FrontendMetrics().of(settings.served_model_names[0])
        self._pipeline = Pipeline(model, self._media, local, limits, counters)
        self.model = _info(model, settings, options)
        self._width = self.model.width

    @classmethod
    async def start(
        cls, loads: Sequence[Load], options: VectorOptions, died: Died, *, log: Sequence[str] = ()
    ) -> Self:
        """Load and warm. ``loads`` are an aggregated worker's, or an encode and an embed worker's.

        ``died`` is told when a worker can run nothing any more. Raises ``ConfigError`` and
        ``CheckpointError`` for what cannot run here.
        """
        settings, model = await asyncio.to_thread(_open, loads[-1])
        return cls(await Workers.start(loads, died, log), model, settings, options)

    async def embed(self, contents: Sequence[Content]) -> Vectors:
        """Raises ``EngineDead`` where the engine can run nothing any more."""
        embedded: dict[int, tuple[npt.NDArray[np.float32], int]] = {}
        errors: dict[int, TesseraError] = {}
        left = list(range(len(contents)))
        pause = _FULL_SECONDS
        while left:
            request = self._request([contents[index] for index in left])
            try:
                call = Call(request_id=f"{next(self._numbers)}", deadline=Deadline.after(_SECONDS))
                result = await self._pipeline.embed(await self._pipeline.prepare(request, call), call)
            except Overloaded:
                pause = await _paused(pause)
                continue
            except RequestError as error:
                errors |= dict.fromkeys(left, error)
                break
            rows = finish(result.rows.values, width=self._width, normalize=True)
            if not result.errors and len(left) == len(contents):
                # As a rule all is well, and to take short texts apart took a fifth of the loop's time.
                counts = np.diff(result.rows.bounds).tolist()
                return Vectors(rows=rows, counts=counts, tokens=result.lengths, errors={})
            full: list[int] = []
            for place, index in enumerate(left):
                failure = result.errors.get(place)
                own = slice(*result.rows.bounds[place : place + 2].tolist())
                if isinstance(failure, Overloaded):
                    full.append(index)
                elif isinstance(failure, Unavailable):
                    raise failure
                elif failure is not None:
                    errors[index] = failure
                else:
                    embedded[index] = rows[own], result.lengths[place]
            if full:
                pause = await _paused(pause)
            left = full
        nothing = np.empty((0, self._width), np.float32), 0
        inputs = [embedded.get(index, nothing) for index in range(len(contents))]
        return Vectors(
            rows=np.concatenate([rows for rows, _ in inputs]) if inputs else nothing[0],
            counts=[len(rows) for rows, _ in inputs],
            tokens=[tokens for _, tokens in inputs],
            errors=errors,
        )

    async def usage(self) -> Usage:
        """Raises ``EngineDead`` as ``embed``."""
        return await self._workers.usage()

    async def close(self) -> None:
        await self._workers.close()
        await self._media.close()

    def _request(self, contents: Sequence[Content]) -> EmbeddingsRequest:
        return EmbeddingsRequest(
            inputs=tuple(
                Input.of(
                    parts=tuple(
                        _File(url="", param="image", data=part.data) if isinstance(part, ImageFile) else part
                        for part in content.parts
                        if part
                    ),
                    role=content.role,
                    instruction=content.instruction,
                    param="text",
                )
                for content in contents
            ),
            truncate=self._options.truncate,
            allow_partial=True,
        )


def model_of(load: Load, options: VectorOptions) -> ModelInfo:
    """Describe the model that an engine would have, without one; raises as ``Engine.start``."""
    settings, model = _open(load)
    return _info(model, settings, options)


def _open(load: Load) -> tuple[WorkerSettings, Model]:
    settings = parse(load.flags, source=load.source or None)
    return settings, open_model(settings.model_path, settings.model_options)


def _info(model: Model, worker: WorkerSettings, options: VectorOptions) -> ModelInfo:
    return ModelInfo(
        name=worker.served_model_names[0],
        fingerprint=model.fingerprint,
        kind=model.output.kind,
        width=_width_of(model, options),
        images=model.vision is not None,
        checkpoint=origin(worker.model_path) or "",
    )


def _width_of(model: Model, options: VectorOptions) -> int:
    """Return the width of the vectors.

    Raises ``ConfigError`` for one that the model does not offer, and for a model that makes no vectors.
    """
    if model.output.kind is OutputKind.SCORE:
        raise ConfigError(f"{model.family} gives scores of pairs, and no vectors")
    widths = Widths.offered(model.dimensions, model.output.width, "")
    if options.dimensions and options.dimensions not in widths:
        raise ConfigError(f"{options.dimensions_param} {options.dimensions}: the model offers {widths}")
    return options.dimensions or model.output.width


async def _paused(seconds: float) -> float:
    """How long to pause the next time: each time texts are made into tokens again."""
    await asyncio.sleep(seconds)
    return min(2 * seconds, _MOST_FULL_SECONDS)
