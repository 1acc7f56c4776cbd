"""Hand-off through host memory that the reader maps from the producer's process."""

from __future__ import annotations

import torch

from tessera.errors import HandOffError, LeaseExpired, TransportUnavailable
from tessera.transport.slab.geometry import check_origin, decode_address, slab_handle, slab_info, unknown_slab
from tessera.transport.slab.memory import HostMemory, ShmAddress
from tessera.transport.slab.rows import check_destination, copy_rows
from tessera.transport.slab.slab import Slab, Slot
from tessera.wire import Handle, SlabInfo


class ShmTransport:
    """Kind ``shm``; see ``Transport`` for the contract."""

    kind = "shm"

    def __init__(self, producer: str, slab: Slab | None = None) -> None:
        self._producer = producer
        self._slab = slab
        self._peers: dict[str, tuple[str, HostMemory]] = {}

    def describe(self) -> SlabInfo | None:
        if self._slab is None or self._slab.memory.rows is None:
            return None
        address = ShmAddress(memory=self._slab.memory.address(), geometry=self._slab.geometry)
        return slab_info(self.kind, self._producer, self._slab, address)

    def connect(self, info: SlabInfo) -> None:
        if info.slab in self._peers:
            return
        address = decode_address(info, ShmAddress)
        if not address.memory.rows:
            raise TransportUnavailable(f"slab {info.slab} has no rows in host memory")
        memory = HostMemory.attach(address.memory, info.slab, address.geometry)
        self._peers[info.slab] = (info.producer, memory)

    def disconnect(self, slab: str) -> None:
        peer = self._peers.pop(slab, None)
        if peer is not None:
            peer[1].close()

    async def publish(self, slot: Slot) -> Handle:
        if self._slab is None:
            raise HandOffError("this process has no slab to publish from")
        await self._slab.stage(slot)
        slot.start_lease()
        return slab_handle(self.kind, self._producer, self._slab, slot)

    def check(self, handle: Handle) -> None:
        self._memory(handle)

    async def fetch(self, handle: Handle, into: torch.Tensor) -> None:
        memory = self._memory(handle)
        check_destination(handle, into)
        unit = memory.geometry.unit_of(handle)
        if not memory.holds(unit, handle.lease):
            raise LeaseExpired(f"lease {handle.lease} had ended before its rows were copied")
        assert memory.rows is not None
        first = unit * memory.geometry.unit_rows
        await copy_rows(memory.rows[first : first + handle.shape[0]], into)

    async def release(self, handle: Handle) -> bool:
        memory = self._memory(handle)
        unit = memory.geometry.unit_of(handle)
        good = memory.holds(unit, handle.lease)
        memory.acknowledge(unit, handle.lease)
        return good

    def abandon(self, handle: Handle) -> None:
        try:
            memory = self._memory(handle)
        except HandOffError:
            return
        memory.acknowledge(memory.geometry.unit_of(handle), handle.lease)

    def close(self) -> None:
        for slab in list(self._peers):
            self.disconnect(slab)

    def _memory(self, handle: Handle) -> HostMemory:
        peer = self._peers.get(handle.slab)
        if peer is None:
            raise unknown_slab(handle)
        producer, memory = peer
        check_origin(handle, kind=self.kind, producer=producer)
        memory.geometry.check(handle)
        return memory
