"""The images of a request, as the prompt and the workers need them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tessera import wire
from tessera.errors import TesseraError
from tessera.frontend.deadline import Deadline
from tessera.frontend.inputs import ImageSource, Input
from tessera.frontend.media import LoadedEmbeddings, MediaLoader
from tessera.models.base import Model
from tessera.transport.lending import inline_handle


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """One image or one tensor of rows: what travels, the tokens it takes and the pixels it has."""

    payload: wire.Image | wire.Embeddings
    tokens: int
    pixels: int

    @property
    def tiles(self) -> int:
        return self.payload.tiles if isinstance(self.payload, wire.Image) else 0


Visions = tuple[Vision, ...]


class VisionReader:
    """Loads all images of a request at the same time."""

    def __init__(self, model: Model, media: MediaLoader) -> None:
        self._model = model
        self._media = media

    async def read(self, inputs: Sequence[Input], deadline: Deadline) -> list[Visions | TesseraError]:
        """Each input's images, or what was wrong with the first bad one."""
        if not any(entry.images for entry in inputs):
            return [()] * len(inputs)
        return await asyncio.gather(*(self._read_input(entry, deadline) for entry in inputs))

    async def _read_input(self, entry: Input, deadline: Deadline) -> Visions | TesseraError:
        try:
            return tuple(await asyncio.gather(*(self._one(source, deadline) for source in entry.images)))
        except TesseraError as error:
            return error

    async def _one(self, source: ImageSource, deadline: Deadline) -> Vision:
        loaded = await self._media.load(source, hidden=self._model.hidden, deadline=deadline)
        if isinstance(loaded, LoadedEmbeddings):
            return Vision(
                payload=wire.Embeddings(
                    digest=loaded.digest,
                    handle=inline_handle(loaded.data, shape=loaded.shape, dtype=loaded.dtype),
                    param=source.param,
                ),
                tokens=loaded.shape[0],
                pixels=0,
            )
        header = loaded.header
        tiles = self._model.tiles(header.width, header.height)
        return Vision(
            payload=wire.Image(digest=loaded.digest, data=loaded.data, tiles=tiles, param=source.param),
            tokens=tiles * self._model.tokens_per_tile,
            pixels=header.width * header.height,
        )
