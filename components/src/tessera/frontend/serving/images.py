"""The images of a request as prompts and workers need them: read, hashed, or recalled by a client's name."""

from __future__ import annotations

import asyncio
import functools
import struct
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter
from typing import Final

import msgspec
from blake3 import blake3

from tessera import wire
from tessera.cache import BoundedLru, SharedCache
from tessera.errors import InvalidInput, MediaNotCached, RequestCancelled, TesseraError
from tessera.frontend.media import LoadedEmbeddings, MediaBudget, MediaLoader
from tessera.frontend.media.embeddings import check_values
from tessera.frontend.request import Image, Input, PixelSource
from tessera.frontend.serving.dispatch import Call
from tessera.models.base import Model, VisionSpec
from tessera.tasks import run_all
from tessera.transport.lending import inline_handle


@dataclass(frozen=True, slots=True)
class KnownImage:
    """What a prompt and a cache key need of an image: its 32-byte blake3 hash, upright size in pixels."""

    digest: bytes
    width: int
    height: int


# A digest, an image's size, and when it was remembered, in nanoseconds of the clock that processes share.
_KNOWN = struct.Struct("<32sIIq")
_MOST_NAMES: Final = 4096


class KnownMedia:
    """The last 4,096 names of each client; owned by one event loop.

    A name is only ever looked up for the client that gave it: guessing another one's names leads nowhere.
    What it stands for is what that client sent last under it; images themselves are not kept. With a
    ``shared`` cache that is what it sent to any frontend of the group.
    """

    def __init__(self, shared: SharedCache | None = None) -> None:
        self._clients: defaultdict[str, BoundedLru[str, bytes]] = defaultdict(lambda: BoundedLru(_MOST_NAMES))
        self._shared = shared

    def remember(self, client: str, name: str, known: KnownImage) -> None:
        kept = _KNOWN.pack(known.digest, known.width, known.height, time.monotonic_ns())
        self._clients[client].put(name, kept)
        if self._shared is not None:
            self._shared.put(_key(client, name), kept)

    def find(self, client: str, name: str) -> KnownImage | None:
        names = self._clients.get(client)
        own = None if names is None else names.get(name)
        entries = [] if own is None else [own]
        if self._shared is not None:
            entries += self._shared.get_all(_key(client, name))
        if not entries:
            return None
        digest, width, height, _ = max(map(_KNOWN.unpack, entries), key=itemgetter(3))
        return KnownImage(digest, width, height)


def _key(client: str, name: str) -> bytes:
    return blake3(f"{len(client)} {client} {name}".encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """One image or one tensor of rows: what travels, and the pixels it has."""

    payload: wire.Image | wire.Embeddings
    pixels: int


Visions = tuple[Vision, ...]


@dataclass(frozen=True, slots=True)
class _Loading:
    """What the images of one request share while they are loaded."""

    spec: VisionSpec
    call: Call
    budget: MediaBudget
    salt: bytes


class ImageReader:
    """Loads all images of a request at the same time."""

    def __init__(self, model: Model, media: MediaLoader, known: KnownMedia | None = None) -> None:
        self._known = known or KnownMedia()
        self._model = model
        self._spec = model.vision
        self._media = media

    async def read(
        self, inputs: Sequence[Input], call: Call, salt: bytes = b"", *, allow_partial: bool
    ) -> list[Visions | TesseraError]:
        """Return each input's images, or what was wrong with the first bad one.

        Unless ``allow_partial``, a bad input ends the loading of those behind it: the request fails over this
        one or one before it. The call's client is whose names for images count. With a
        ``salt`` an image has another digest: to workers it is none that came without it.
        """
        visions: list[Visions | TesseraError] = [entry.malformed or () for entry in inputs]
        if self._spec is None:
            return [_refused(entry) if entry.images else entry.malformed or () for entry in inputs]
        loading = _Loading(self._spec, call, self._media.budget(call.client, call.hold), salt)
        wanted = [index for index, entry in enumerate(inputs) if entry.images]
        if len(wanted) == 1:
            # Without a task of its own: 8 µs, where base64 and hash of a tile take 13.
            visions[wanted[0]] = await self._read_input(inputs[wanted[0]], loading)
        elif wanted:
            await self._read_several(inputs, visions, wanted, loading, allow_partial=allow_partial)
        return visions

    async def _read_several(
        self,
        inputs: Sequence[Input],
        visions: list[Visions | TesseraError],
        wanted: Sequence[int],
        loading: _Loading,
        *,
        allow_partial: bool,
    ) -> None:
        tasks = {index: asyncio.ensure_future(self._read_input(inputs[index], loading)) for index in wanted}

        def settled(index: int, task: asyncio.Future[Visions | TesseraError]) -> None:
            if not task.cancelled() and isinstance(task.result(), TesseraError):
                for later, other in tasks.items():
                    if later > index:
                        other.cancel()

        if not allow_partial:
            for index, task in tasks.items():
                task.add_done_callback(functools.partial(settled, index))
        try:
            await asyncio.wait(tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
        for index, task in tasks.items():
            visions[index] = (
                RequestCancelled("not loaded, because an input before it failed")
                if task.cancelled()
                else task.result()
            )

    async def _read_input(self, entry: Input, loading: _Loading) -> Visions | TesseraError:
        try:
            visions = await run_all([self._read_image(source, loading) for source in entry.images])
        except TesseraError as error:
            return error.kept()
        return tuple([_salted(vision, loading.salt) for vision in visions] if loading.salt else visions)

    async def _read_image(self, source: Image, loading: _Loading) -> Vision:
        call, budget, spec = loading.call, loading.budget, loading.spec
        if isinstance(source, PixelSource):
            budget.take(source.values.nbytes, param=source.param)
            return await self._media.threads.run(functools.partial(_normalised, source, spec), call.client)
        if source.uuid is not None and not source.url:
            return self._recalled(source.param, call.client, source.uuid)
        loaded = await self._media.load(
            source, row_width=spec.row_width, deadline=call.deadline, budget=budget
        )
        if isinstance(loaded, LoadedEmbeddings):
            handle = inline_handle(loaded.data, shape=loaded.shape, dtype=loaded.dtype)
            rows = wire.Embeddings(digest=loaded.digest, handle=handle, grid=loaded.grid, param=source.param)
            return Vision(payload=rows, pixels=0)
        known = KnownImage(loaded.digest, *loaded.size)
        if source.uuid is not None:
            self._known.remember(call.client, source.uuid, known)
        return self._vision(known, loaded.data, source.param)

    def _recalled(self, param: str, client: str, uuid: str) -> Vision:
        """Return an image that the client has sent before: its rows may be in a worker's cache."""
        known = self._known.find(client, uuid)
        if known is None:
            # To the client it is the same as one that a worker has no rows of any more.
            raise MediaNotCached.at(param, "no image is known by this uuid; send it again")
        return self._vision(known, b"", param)

    def _vision(self, known: KnownImage, data: bytes, param: str) -> Vision:
        plan = self._model.plan(known.width, known.height, param=param)
        return Vision(
            payload=wire.Image(
                digest=known.digest, data=data, units=plan.units, rows=plan.rows, grid=plan.grid, param=param
            ),
            pixels=known.width * known.height,
        )


def _salted(vision: Vision, salt: bytes) -> Vision:
    digest = blake3(vision.payload.digest + salt).digest()
    return replace(vision, payload=msgspec.structs.replace(vision.payload, digest=digest))


def _normalised(source: PixelSource, vision: VisionSpec) -> Vision:
    """Pixels as they travel; raises ``InvalidInput`` for another type or shape, and what is not finite."""
    values, param = source.values, source.param
    if not vision.independent_units:
        raise InvalidInput.at(
            param, "this model takes image files; normalised pixels are taken where images are tiles"
        )
    kind = values.dtype.newbyteorder("=").name
    if kind not in ("float32", "float16"):
        raise InvalidInput.at(param, f"expected float32 or float16 pixels, found {values.dtype}")
    units = values.shape[0] if values.ndim else 0
    if values.shape[1:] != vision.unit_shape or not 1 <= units <= vision.max_units:
        shape = ", ".join(map(str, vision.unit_shape))
        raise InvalidInput.at(
            param, f"expected pixels [1 to {vision.max_units}, {shape}], found {list(values.shape)}"
        )
    check_values(values, "the pixels hold", param)
    data = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    # No file's hash: what is kept of a file with these bytes is another image.
    digest = blake3(data, derive_key_context=f"tessera pixels {kind}").digest()
    payload = wire.Image(
        digest=digest,
        data=data,
        units=units,
        rows=vision.rows(units),
        pixels="float32" if kind == "float32" else "float16",
        param=param,
    )
    return Vision(payload=payload, pixels=units * prod(vision.unit_shape[1:]))


def _refused(entry: Input) -> TesseraError:
    param = entry.images[0].param
    return entry.malformed or InvalidInput.at(param, "this model reads text alone, and here is an image")
