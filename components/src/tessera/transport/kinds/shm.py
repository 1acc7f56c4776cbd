"""Hand-off through host memory that the reader maps from the producer's process.

``MappedSlab``, a peer's slab that is mapped into this process, serves ``cuda_ipc`` too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import torch

from tessera.errors import HandOffError, LeaseExpired, TransportUnavailable
from tessera.transport.host import host_id
from tessera.transport.slab.geometry import decode_address, slab_info, unknown_slab
from tessera.transport.slab.memory import HostMemory, ShmAddress
from tessera.transport.slab.slab import Slab, Slot, copy_rows, destination
from tessera.wire import Handle, ReaderInfo, SlabInfo

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
        rows = destination(handle, into)
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
        return self._memory.geometry.check(handle, self._kind, self._producer)


class ShmTransport:
    """Kind ``shm``; see ``Transport`` for the contract."""

    kind = "shm"
    registrations = 0

    def __init__(self, producer: str, slab: Slab | None = None) -> None:
        self._producer = producer
        self._slab = slab

    @property
    def info(self) -> SlabInfo | None:
        if self._slab is None or self._slab.memory.rows is None:
            return None
        address = ShmAddress(memory=self._slab.memory.address(), geometry=self._slab.geometry)
        return slab_info(self.kind, self._producer, self._slab, address)

    def reaches(self, reader: ReaderInfo) -> bool:
        return reader.host == host_id()

    async def publish(self, slot: Slot) -> Handle:
        if self._slab is None:
            raise HandOffError("this process has no slab to publish from")
        await self._slab.stage(slot)
        return self._slab.lease(slot, self.kind, self._producer)

    def connect(self, info: SlabInfo) -> MappedSlab:
        address = decode_address(info, ShmAddress)
        if not address.memory.rows:
            raise TransportUnavailable(f"slab {info.slab} has no rows in host memory")
        memory = HostMemory.attach(address.memory, info.slab, address.geometry)
        assert memory.rows is not None
        return MappedSlab(info, memory, memory.rows, copy_rows)

    def close(self) -> None:
        """Nothing is held."""
