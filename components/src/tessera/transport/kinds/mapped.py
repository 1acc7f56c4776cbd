"""A peer's slab that is mapped into this process: what the ``shm`` and ``cuda_ipc`` kinds read from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import torch

from tessera.errors import HandOffError, LeaseExpired
from tessera.transport.slab.geometry import check_origin, unknown_slab
from tessera.transport.slab.memory import HostMemory
from tessera.transport.slab.rows import TORCH_DTYPES, check_destination
from tessera.wire import Handle, SlabInfo

if TYPE_CHECKING:
    from tessera.transport.base import Destination

CopyRows = Callable[[torch.Tensor, torch.Tensor], Awaitable[None]]
"""Copies ``[rows, row_width]`` from the slab into the destination, and returns when that has happened."""


class MappedSlab:
    """Implements ``PeerSlab`` for lease words in ``memory`` and ``rows`` here or on a GPU."""

    def __init__(self, info: SlabInfo, memory: HostMemory, rows: torch.Tensor, copy: CopyRows) -> None:
        self._kind = info.kind
        self._producer = info.producer
        self._memory = memory
        self._rows = rows
        self._copy = copy
        self._closed = False

    async def fetch(self, handle: Handle, into: Destination) -> torch.Tensor:
        block = self._block_of(handle)
        rows = into(handle.shape, TORCH_DTYPES[handle.dtype])
        check_destination(handle, rows)
        if not self._memory.holds(block, handle.lease):
            raise LeaseExpired(f"lease {handle.lease} had ended before its rows were copied")
        first = block * self._memory.geometry.block_rows
        await self._copy(self._rows[first : first + handle.shape[0]], rows)
        return rows

    async def release(self, handle: Handle) -> bool:
        block = self._block_of(handle)
        good = self._memory.holds(block, handle.lease)
        self._memory.acknowledge(block, handle.lease)
        return good

    def abandon(self, handle: Handle) -> None:
        try:
            block = self._block_of(handle)
        except HandOffError:
            return
        self._memory.acknowledge(block, handle.lease)

    def close(self) -> None:
        self._closed = True
        # The last tensor of the mapping keeps it alive.
        self._rows = torch.empty(0)
        self._memory.close()

    def _block_of(self, handle: Handle) -> int:
        """Check the handle; the block whose lease word speaks for its slot."""
        if self._closed:
            raise unknown_slab(handle)
        check_origin(handle, kind=self._kind, producer=self._producer)
        geometry = self._memory.geometry
        geometry.check(handle)
        return geometry.block_of(handle)
