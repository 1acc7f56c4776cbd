"""Putting fresh vision rows into the CPU cache without holding up the request that encoded them."""

from __future__ import annotations

import asyncio

import torch

from tessera.cache import EmbeddingCache
from tessera.engine.torch_host_copies import HostCopies


class CacheFill:
    """Rows in host memory go in at once, rows on a device when their copy has arrived.

    Until then the same image may be encoded once more, which costs time and changes no vector.
    """

    def __init__(self, cache: EmbeddingCache) -> None:
        self._cache = cache
        self._copies = HostCopies()
        self._arriving: set[asyncio.Task[None]] = set()

    def put(self, key: bytes, rows: torch.Tensor) -> None:
        if not rows.is_cuda:
            self._cache.put(key, rows)
            return
        task = asyncio.create_task(self._arrive(key, rows))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def close(self) -> None:
        """Wait for the copies under way."""
        await asyncio.gather(*self._arriving, return_exceptions=True)
        self._copies.close()

    async def _arrive(self, key: bytes, rows: torch.Tensor) -> None:
        self._cache.put(key, await self._copies.copy(rows))
