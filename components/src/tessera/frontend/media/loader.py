"""From an image source to its bytes, hash and header, whatever the source is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from blake3 import blake3

from tessera.errors import InvalidInput
from tessera.frontend.deadline import Deadline
from tessera.frontend.inputs import ImageSource
from tessera.frontend.media.data_url import decode, payload_size
from tessera.frontend.media.fetch import Fetcher
from tessera.frontend.media.local import read_local
from tessera.frontend.media.policy import MediaPolicy
from tessera.imaging import ImageHeader, probe

_Result = TypeVar("_Result")

_THREAD_BYTES = 256 * 1024
"""From this size on, work goes to a thread: below it, the hop costs more than the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedImage:
    """An encoded image that passed the policy; ``digest`` is the 32-byte blake3 hash of ``data``."""

    data: bytes
    digest: bytes
    header: ImageHeader


class MediaLoader:
    """Loads images under one policy; owned by one event loop. ``close`` ends it."""

    def __init__(self, policy: MediaPolicy, *, fetcher: Fetcher | None = None) -> None:
        self._policy = policy
        self._fetcher = fetcher or Fetcher(policy)

    async def load(self, source: ImageSource, *, deadline: Deadline) -> LoadedImage:
        """Obtain, check and hash one image.

        Raises ``RequestError`` subclasses naming ``source.param``, or ``DeadlineExceeded``.
        """
        data = await self.read(source, deadline=deadline)
        header = probe(data, param=source.param, max_pixels=self._policy.max_pixels)
        digest = await _off_loop(len(data), lambda: blake3(data).digest())
        return LoadedImage(data=data, digest=digest, header=header)

    async def read(self, source: ImageSource, *, deadline: Deadline) -> bytes:
        """The bytes of a source, not yet looked at."""
        url, param, limit = source.url, source.param, self._policy.max_bytes
        deadline.left()
        scheme = url[:8].lower()
        if scheme.startswith("data:"):
            return await _off_loop(payload_size(url), lambda: decode(url, param=param, max_bytes=limit))
        if scheme.startswith(("http://", "https://")):
            return await self._fetcher.get(url, param=param, deadline=deadline)
        if scheme.startswith(("file://", "/")):
            root = self._policy.allowed_local_path
            return await asyncio.to_thread(read_local, url, root=root, max_bytes=limit, param=param)
        raise InvalidInput(f"{param}: expected a data, http, https or file URL", param=param)

    async def close(self) -> None:
        await self._fetcher.close()


async def _off_loop(size: int, work: Callable[[], _Result]) -> _Result:
    return await asyncio.to_thread(work) if size >= _THREAD_BYTES else work()
