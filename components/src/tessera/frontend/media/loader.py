"""From an image source to its bytes, hash and header, whatever the source is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from blake3 import blake3

from tessera.errors import InvalidInput, UnsupportedMedia
from tessera.frontend.api.request import ImageSource
from tessera.frontend.media.embeddings import (
    SUFFIX,
    UNSAFE_SUFFIXES,
    LoadedEmbeddings,
    looks_like_safetensors,
    read_embeddings,
)
from tessera.frontend.media.fetch import Fetcher
from tessera.frontend.media.policy import ImageLimits, MediaBudget, MediaPolicy
from tessera.frontend.media.sources import decode, payload_size, read_local
from tessera.imaging import ImageHeader, probe
from tessera.tasks import Deadline

_Result = TypeVar("_Result")

_THREAD_BYTES = 256 * 1024
"""From this size on, work goes to a thread: below it, the hop costs more than the work."""

_WEB = ("http://", "https://")
_LOCAL = ("file://", "/")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedImage:
    """An encoded image that passed the policy; ``digest`` is the 32-byte blake3 hash of ``data``."""

    data: bytes
    digest: bytes
    header: ImageHeader


class MediaLoader:
    """Loads images under one policy, within limits; owned by one event loop. ``close`` ends it."""

    def __init__(
        self, policy: MediaPolicy, limits: ImageLimits | None = None, *, fetcher: Fetcher | None = None
    ) -> None:
        self._root = policy.allowed_local_path
        self._limits = limits or ImageLimits()
        self._fetcher = fetcher or Fetcher(policy, self._limits)

    async def load(
        self, source: ImageSource, *, hidden: int, deadline: Deadline, budget: MediaBudget | None = None
    ) -> LoadedImage | LoadedEmbeddings:
        """Obtain, check and hash one image, or one tensor of rows ``hidden`` wide.

        ``budget`` is what the images of the request share; without one, this image is the only one.
        Raises ``RequestError`` subclasses naming ``source.param``, or ``DeadlineExceeded``.
        """
        tensor = _claims_tensor(source)
        data = await self.read(source, deadline=deadline, budget=budget or self.budget())

        def examine() -> LoadedImage | LoadedEmbeddings:
            digest = blake3(data).digest()
            carried = not source.url[:8].lower().startswith(_WEB)
            if tensor or (carried and looks_like_safetensors(data)):
                return read_embeddings(data, hidden=hidden, digest=digest, param=source.param)
            header = probe(data, param=source.param, max_pixels=self._limits.max_pixels)
            return LoadedImage(data=data, digest=digest, header=header)

        return await _off_loop(len(data), examine)

    def budget(self) -> MediaBudget:
        """For the images of one request."""
        return MediaBudget(self._limits.max_request_bytes)

    async def read(self, source: ImageSource, *, deadline: Deadline, budget: MediaBudget) -> bytes:
        """The bytes of a source, not yet looked at."""
        url, param, limit = source.url, source.param, self._limits.max_bytes
        deadline.left()
        scheme = url[:8].lower()
        if scheme.startswith("data:"):
            # An upper bound, before the payload is there a second time.
            budget.take(payload_size(url), param=param)
            return await _off_loop(payload_size(url), lambda: decode(url, param=param, max_bytes=limit))
        if scheme.startswith(_WEB):
            return await self._fetcher.get(url, param=param, deadline=deadline, budget=budget)
        if scheme.startswith(_LOCAL):
            # Each is read whole on a thread, so only what came before counts against it.
            data = await asyncio.to_thread(read_local, url, root=self._root, max_bytes=limit, param=param)
            budget.take(len(data), param=param)
            return data
        raise InvalidInput(f"{param}: expected a data, http, https or file URL", param=param)

    async def close(self) -> None:
        await self._fetcher.close()


def _claims_tensor(source: ImageSource) -> bool:
    """Whether the source is said to hold embeddings; refuses what could only hold them unsafely.

    Looking at a local name costs nothing and gives a better answer than the bytes would: a pickle is not
    opened at all.
    """
    url = source.url
    scheme = url[:8].lower()
    if scheme.startswith(_LOCAL) and url.lower().endswith(UNSAFE_SUFFIXES):
        raise UnsupportedMedia(
            f"{source.param}: files that can hold pickles are not read; use {SUFFIX}", param=source.param
        )
    named = scheme.startswith((*_LOCAL, *_WEB)) and url.lower().endswith(SUFFIX)
    if (source.embeddings or named) and scheme.startswith(_WEB):
        raise UnsupportedMedia(
            f"{source.param}: embeddings are taken from an allowed local path or inline, not from a URL",
            param=source.param,
        )
    return source.embeddings or named


async def _off_loop(size: int, work: Callable[[], _Result]) -> _Result:
    return await asyncio.to_thread(work) if size >= _THREAD_BYTES else work()
