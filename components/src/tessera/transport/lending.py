"""Rows that a process without a shared slab, a GPU or torch hands to one reader on its own host.

Each loan is a slab of one slot, of kind ``shm``. The reader maps it, copies the rows, checks that the lease
was still good, and acknowledges, as it does with an encode worker's slab. The lender ends the lease when the
call that carried the handle is over, however it ended: there is no sweep.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from tessera.transport.slab.geometry import MAX_LEASE, Geometry, slab_info
from tessera.transport.slab.memory import HostMemory, ShmAddress, fence
from tessera.wire import Handle, SlabInfo

KIND = "shm"


def inline_handle(data: bytes, *, shape: tuple[int, int], dtype: str) -> Handle:
    """Rows that travel in the message itself, for readers elsewhere; nothing is leased."""
    lease = secrets.randbelow(MAX_LEASE) + 1
    return Handle(
        kind="inline", producer="", slab="", offset=0, shape=shape, dtype=dtype, lease=lease, data=data
    )


class Loan:
    """One tensor's rows, readable by peers until ``close``."""

    def __init__(self, memory: HostMemory, handle: Handle, info: SlabInfo, ended: Callable[[], None]) -> None:
        self.handle = handle
        self.info = info
        self._memory = memory
        self._ended = ended

    @property
    def acknowledged(self) -> bool:
        """Whether the reader has said that it is done; only to be asked before ``close``."""
        return self._memory.ack[0] == self.handle.lease

    def close(self) -> None:
        """End the lease and give the memory back; a reader that is still copying finds its lease gone."""
        self._memory.lease[0] = 0
        fence()
        self._memory.close()
        self._ended()


class Lender:
    """Lends at most ``capacity`` bytes at a time. Not thread-safe: owned by one event loop."""

    def __init__(self, producer: str, *, capacity: int) -> None:
        self._producer = producer
        self._capacity = capacity
        self.lent = 0

    def lend(self, rows: Handle) -> Loan | None:
        """The rows of an inline handle; None when they do not fit beside what is lent already.

        The memory is the reader's to map by this process's descriptors, so both must be one host's.
        """
        data, shape, dtype = rows.data, rows.shape, rows.dtype
        if self.lent + len(data) > self._capacity:
            return None
        geometry = Geometry(capacity_rows=shape[0], block_rows=shape[0], row_width=shape[1], dtype=dtype)
        memory = HostMemory.create(geometry, rows=True)
        memory.write(data)
        lease = secrets.randbelow(MAX_LEASE) + 1
        fence()
        memory.lease[0] = lease
        address = ShmAddress(memory=memory.address(), geometry=geometry)
        info = slab_info(KIND, self._producer, memory.slab, address)
        handle = Handle(
            kind=KIND,
            producer=self._producer,
            slab=memory.slab,
            offset=0,
            shape=shape,
            dtype=dtype,
            lease=lease,
        )
        self.lent += len(data)
        return Loan(memory, handle, info, lambda: self._returned(len(data)))

    def _returned(self, nbytes: int) -> None:
        self.lent -= nbytes
