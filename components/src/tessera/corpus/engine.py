"""The frontend's pipeline in front of workers in child processes, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from tessera.checkpoint.origin import origin
from tessera.corpus.columns import Columns
from tessera.corpus.embedder import Served, Usage, VectorSettings
from tessera.corpus.frames import Load
from tessera.corpus.item import Item, Picture
from tessera.corpus.parent import Died
from tessera.corpus.workers import Workers
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
from tessera.models import open_model
from tessera.models.base import Model, OutputKind
from tessera.settings import GIB
from tessera.tasks import Deadline
from tessera.worker.settings import WorkerSettings, parse

# Of one call. What waits does so behind what its own run has asked for, so it is there to end what hangs.
_SECONDS: Final = 3600.0
# Until a full engine is asked again, the first time and at most. Its queue lasts an H200 for 0.9 s.
_FULL_SECONDS: Final = 0.05
_MOST_FULL_SECONDS: Final = 0.4
# Files have been bounded where they were read, and a call's items by the run.
_NO_LIMIT: Final = 64 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class _File(ImageSource):
    """An image whose bytes are there; its ``url`` means nothing."""

    data: bytes


class _FileLoader(MediaLoader):
    """Gives each image the bytes that its item came with; fetches nothing and opens no file."""

    async def read_named(self, source: ImageSource, deadline: Deadline, budget: MediaBudget) -> bytes:
        assert isinstance(source, _File)
        return source.data


class Engine:
    """The workers of a card, in child processes, and their pipeline in this one."""

    def __init__(
        self, workers: Workers, model: Model, settings: WorkerSettings, vectors: VectorSettings
    ) -> None:
        limits = Limits(
            max_tokens=vectors.max_tokens,
            images=ImageLimits(
                max_bytes=_NO_LIMIT, max_request_bytes=_NO_LIMIT, max_pixels=settings.max_image_pixels
            ),
        )
        self._workers = workers
        self._vectors = vectors
        self._numbers = count()
        self._media = _FileLoader(MediaPolicy(), limits.images)
        local = LocalEmbedder(workers.ask, model)
        counters = FrontendMetrics().of(settings.served_model_names[0])
        self._pipeline = Pipeline(model, self._media, local, limits, counters)
        self.served = served_by(model, settings, vectors)
        self._width = self.served.width

    @classmethod
    async def start(
        cls, loads: Sequence[Load], vectors: VectorSettings, died: Died, *, log: Sequence[str] = ()
    ) -> Self:
        """Load and warm. ``loads`` are an aggregated worker's, or an encode and an embed worker's.

        ``died`` is told when a worker can run nothing any more. Raises ``ConfigError`` and
        ``CheckpointError`` for what cannot run here.
        """
        settings = await asyncio.to_thread(parse, loads[-1].flags, source=loads[-1].source or None)
        model = await asyncio.to_thread(open_model, settings.model_path, settings.model_options)
        return cls(await Workers.start(loads, died, log), model, settings, vectors)

    async def embed(self, items: Sequence[Item]) -> Columns:
        """Raises ``EngineDead`` where the engine can run nothing any more."""
        made: dict[int, tuple[npt.NDArray[np.float32], int]] = {}
        reasons: dict[int, str] = {}
        left = list(range(len(items)))
        pause = _FULL_SECONDS
        while left:
            request = self._request([items[index] for index in left])
            try:
                call = Call(request_id=f"{next(self._numbers)}", deadline=Deadline.after(_SECONDS))
                result = await self._pipeline.embed(await self._pipeline.prepare(request, call), call)
            except Overloaded:
                pause = await _paused(pause)
                continue
            except RequestError as error:
                reasons |= dict.fromkeys(left, _reason(error))
                break
            rows = finish(result.rows.values, width=self._width, normalize=True)
            if not result.errors and len(left) == len(items):
                # As a rule all is well, and to take short texts apart took a fifth of the loop's time.
                counts = np.diff(result.rows.bounds).tolist()
                return Columns(rows=rows, counts=counts, tokens=result.lengths, reasons={})
            full: list[int] = []
            for place, index in enumerate(left):
                wrong = result.errors.get(place)
                own = slice(*result.rows.bounds[place : place + 2].tolist())
                if isinstance(wrong, Overloaded):
                    full.append(index)
                elif isinstance(wrong, Unavailable):
                    raise wrong
                elif wrong is not None:
                    reasons[index] = _reason(wrong)
                else:
                    made[index] = rows[own], result.lengths[place]
            if full:
                pause = await _paused(pause)
            left = full
        nothing = np.empty((0, self._width), np.float32), 0
        found = [made.get(index, nothing) for index in range(len(items))]
        return Columns(
            rows=np.concatenate([rows for rows, _ in found]) if found else nothing[0],
            counts=[len(rows) for rows, _ in found],
            tokens=[tokens for _, tokens in found],
            reasons=reasons,
        )

    async def usage(self) -> Usage:
        """Raises ``EngineDead`` as ``embed``."""
        return await self._workers.usage()

    async def close(self) -> None:
        await self._workers.close()
        await self._media.close()

    def _request(self, items: Sequence[Item]) -> EmbeddingsRequest:
        return EmbeddingsRequest(
            inputs=tuple(
                Input.of(
                    parts=tuple(
                        _File(url="", param="image", data=part.data) if isinstance(part, Picture) else part
                        for part in item.parts
                        if part
                    ),
                    role=self._vectors.role_of(item),
                    instruction=item.instruction,
                    param="text",
                )
                for item in items
            ),
            truncate=self._vectors.truncate.truncate,
            allow_partial=True,
        )


def served_by(model: Model, worker: WorkerSettings, vectors: VectorSettings) -> Served:
    """What an engine of these settings serves, which needs no engine; raises as ``width_of``."""
    return Served(
        name=worker.served_model_names[0],
        fingerprint=model.fingerprint,
        kind=model.output.kind,
        width=width_of(model, vectors),
        images=model.vision is not None,
        checkpoint=origin(worker.model_path) or "",
    )


def width_of(model: Model, vectors: VectorSettings) -> int:
    """The width of the vectors. Raises ``ConfigError`` for one that the model does not offer, and for a model
    that makes no vectors."""
    if model.output.kind is OutputKind.SCORE:
        raise ConfigError(f"{model.family} gives scores of pairs: a corpus needs a model that makes vectors")
    widths = Widths.offered(model.dimensions, model.output.width, "")
    if vectors.dimensions and vectors.dimensions not in widths:
        raise ConfigError(f"--dimensions {vectors.dimensions}: the model offers {widths}")
    return vectors.dimensions or model.output.width


async def _paused(seconds: float) -> float:
    """How long to pause the next time: each time texts are made into tokens again."""
    await asyncio.sleep(seconds)
    return min(2 * seconds, _MOST_FULL_SECONDS)


def _reason(error: TesseraError) -> str:
    return f"{error.code}: {error.message}"
