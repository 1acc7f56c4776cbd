"""Hand-off through host memory that the reader maps from the producer's process.

``MappedSlab``, a peer's slab that is mapped into this process, serves ``cuda_ipc`` too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import torch

from tessera.errors import LeaseExpired, TransportUnavailable
from tessera.transport.base import PeerSlab, Transport
from tessera.transport.host import host_id
from tessera.transport.slab.geometry import decode_address, slab_info
from tessera.transport.slab.memory import HostMemory, ShmAddress
from tessera.transport.slab.slab import Slab, Slot, copy_rows, destination
from tessera.wire import Handle, ReaderInfo, SlabInfo

if TYPE_CHECKING:
    from tessera.transport.base import Destination

CopyRows = Callable[[torch.Tensor, torch.Tensor], Awaitable[None]]
"""Copies ``[rows, row_width]`` from the slab into the destination, and returns when that has happened."""


class MappedSlab(PeerSlab):
    """A slab with lease words in ``memory`` and ``rows`` here or on a GPU."""

    def __init__(self, info: SlabInfo, memory: HostMemory, rows: torch.Tensor, copy: CopyRows) -> None:
        super().__init__(info, memory.geometry)
        self._memory = memory
        self._rows = rows
        self._copy = copy

    async def fetch(self, handle: Handle, into: Destination) -> torch.Tensor:
        block = self._geometry.check(handle, self._info)
        rows = destination(handle, into)
        if not self._memory.holds(block, handle.lease):
            raise LeaseExpired(f"lease {handle.lease} had ended before its rows were copied")
        first = block * self._geometry.block_rows
        await self._copy(self._rows[first : first + handle.shape[0]], rows)
        return rows

    async def release(self, handle: Handle) -> bool:
        block = self._geometry.check(handle, self._info)
        good = self._memory.holds(block, handle.lease)
        self._give_back(block, handle)
        return good

    def _give_back(self, block: int, handle: Handle) -> None:
        self._memory.acknowledge(block, handle.lease)

    def close(self) -> None:
        super().close()
        # The last tensor of the mapping keeps it alive.
        self._rows = torch.empty(0)
        self._memory.close()


class ShmTransport(Transport):
    """Kind ``shm``."""

    kind = "shm"

    def __init__(self, producer: str, slab: Slab | None = None) -> None:
        super().__init__(producer, slab)
        if slab is not None and slab.memory.rows is not None:
            address = ShmAddress(memory=slab.memory.address(), geometry=slab.geometry)
            self.info = slab_info(self.kind, producer, slab.name, address)

    def reaches(self, reader: ReaderInfo) -> bool:
        return reader.host == host_id()

    async def publish(self, slot: Slot) -> Handle:
        await slot.slab.stage(slot)
        return slot.slab.lease(slot, self.kind, self._producer)

    def connect(self, info: SlabInfo) -> PeerSlab:
        address = decode_address(info, ShmAddress)
        if not address.memory.rows:
            raise TransportUnavailable(f"slab {info.slab} has no rows in host memory")
        memory = HostMemory.attach(address.memory, info.slab, address.geometry)
        assert memory.rows is not None
        return MappedSlab(info, memory, memory.rows, copy_rows)
