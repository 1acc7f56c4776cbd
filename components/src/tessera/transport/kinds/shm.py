"""Hand-off through host memory that the reader maps from the producer's process."""

from __future__ import annotations

from tessera.errors import HandOffError, TransportUnavailable
from tessera.transport.kinds.mapped import MappedSlab
from tessera.transport.slab.geometry import decode_address, slab_handle, slab_info
from tessera.transport.slab.memory import HostMemory, ShmAddress
from tessera.transport.slab.rows import copy_rows
from tessera.transport.slab.slab import Slab, Slot
from tessera.wire import Handle, SlabInfo


class ShmTransport:
    """Kind ``shm``; see ``Transport`` for the contract."""

    kind = "shm"

    def __init__(self, producer: str, slab: Slab | None = None) -> None:
        self._producer = producer
        self._slab = slab

    @property
    def info(self) -> SlabInfo | None:
        if self._slab is None or self._slab.memory.rows is None:
            return None
        address = ShmAddress(memory=self._slab.memory.address(), geometry=self._slab.geometry)
        return slab_info(self.kind, self._producer, self._slab, address)

    async def publish(self, slot: Slot) -> Handle:
        if self._slab is None:
            raise HandOffError("this process has no slab to publish from")
        await self._slab.stage(slot)
        slot.start_lease()
        return slab_handle(self.kind, self._producer, self._slab, slot)

    def connect(self, info: SlabInfo) -> MappedSlab:
        address = decode_address(info, ShmAddress)
        if not address.memory.rows:
            raise TransportUnavailable(f"slab {info.slab} has no rows in host memory")
        memory = HostMemory.attach(address.memory, info.slab, address.geometry)
        assert memory.rows is not None
        return MappedSlab(info, memory, memory.rows, copy_rows)

    def close(self) -> None:
        """Nothing is held."""
