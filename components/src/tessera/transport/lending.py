"""Memory of a process that a peer on its host reads rows from, or writes them to, in place of a message.

Each loan is a slab of one slot, of kind ``shm``, for one call; its owner needs no shared slab, no GPU and no
torch. A reader maps it, copies the rows, checks that the lease was still good, and acknowledges, as it does
with an encode worker's slab. The lease ends with the call, however that ended: there is no sweep. For a
writer nothing is leased: the owner alone reads, and does not use memory again that somebody may still be
writing to.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
import weakref
from collections import deque
from typing import Final

import msgspec

from tessera.free_memory import free_aside
from tessera.transport.host import host_id
from tessera.transport.slab.geometry import MAX_LEASE, Geometry, decode_address, slab_info
from tessera.transport.slab.memory import HostMemory, ShmAddress, fence
from tessera.wire import Handle, SlabInfo, WorkerInfo

log = logging.getLogger(__name__)

KIND: Final = "shm"
# Long replies differ in their rows: memory for one serves others of about its size.
_STEP_BYTES: Final = 1 << 20
# After each half of what is free is let go: an idle process keeps none.
_KEPT_SECONDS: Final = 30.0
# After a worker on this host could not reach what was lent to it, rows go into the messages for so long.
_NOT_LENT_SECONDS: Final = 60.0


def inline_handle(data: bytes, *, shape: tuple[int, int], dtype: str) -> Handle:
    """Rows that travel in the message itself, for readers elsewhere; nothing is leased."""
    lease = secrets.randbelow(MAX_LEASE) + 1
    return Handle(
        kind="inline", producer="", slab="", offset=0, shape=shape, dtype=dtype, lease=lease, data=data
    )


def land(info: SlabInfo, rows: memoryview) -> None:
    """Write the bytes of rows to a peer's memory; raises ``TransportUnavailable`` where that cannot be."""
    address = decode_address(info, ShmAddress)
    HostMemory.fill(address.memory, info.slab, address.geometry, rows)


class Loan:
    """Memory that a peer reaches by ``info`` until ``close``."""

    def __init__(self, memory: HostMemory, lender: Lender) -> None:
        self._memory: HostMemory | None = memory
        self._lender = lender
        address = ShmAddress(memory=memory.address(), geometry=memory.geometry)
        self.info = slab_info(KIND, lender.producer, memory.slab, address)

    def lease(self, rows: Handle) -> Handle:
        """Let a reader have the rows of an inline handle, by the handle that is returned."""
        assert self._memory is not None
        self._memory.write(rows.data)
        lease = secrets.randbelow(MAX_LEASE) + 1
        fence()
        self._memory.lease[0] = lease
        own = self.info
        return msgspec.structs.replace(
            rows, kind=KIND, producer=own.producer, slab=own.slab, lease=lease, data=b""
        )

    def landed(self, nbytes: int) -> memoryview:
        """Return so many bytes that were written; their memory is used again once they are let go of."""
        memory, self._memory = self._memory, None
        assert memory is not None
        whole = memory.array()
        # The last of its views may go on any thread.
        weakref.finalize(whole, self._lender.free.append, memory).atexit = False
        return whole.data[:nbytes]

    def close(self) -> None:
        """Let go of the memory, unless what has landed in it is in use.

        A reader that is still copying finds its lease gone, and nobody sees what a writer still writes.
        """
        if self._memory is not None:
            self._memory.lease[0] = 0
            fence()
            self._lender.close(self._memory)
            self._memory = None


class Lender:
    """Lends at most ``capacity`` bytes at a time, and keeps for a while what replies have landed in.

    What is lent is the peer's to reach by this process's descriptors, so both must be one host's.
    To write 13 MB into new memory takes 12 ms of a processor, into what is there already 4. Owned by one
    event loop, but for ``free``: what is there and not in use.
    """

    def __init__(self, producer: str, *, capacity: int) -> None:
        self.producer = producer
        self.free: deque[HostMemory] = deque()
        self._capacity = capacity
        self._nbytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._paused_until = -math.inf

    def reaches(self, worker: WorkerInfo | None) -> bool:
        """Whether a worker can have memory of this process, as far as is known."""
        here = worker is not None and worker.host == host_id()
        return here and time.monotonic() >= self._paused_until

    def unreachable(self, worker: WorkerInfo | None) -> None:
        """A worker could not reach what was lent to it."""
        if self.reaches(worker):
            self._paused_until = time.monotonic() + _NOT_LENT_SECONDS
            log.warning("a worker on this host could not reach lent rows; they go into messages for a while")

    @property
    def lent(self) -> int:
        """Bytes that are in use: peers may be reading or writing them, or a reply is there."""
        return self._nbytes - sum([memory.geometry.nbytes for memory in tuple(self.free)])

    def landing(self, nbytes: int) -> Loan | None:
        """Lend memory for a reply with so many bytes of rows; None where there is no room for it."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_KEPT_SECONDS, self.let_go)
        return self.take((-(-nbytes // _STEP_BYTES), _STEP_BYTES // 4), "float32")

    def take(self, shape: tuple[int, int], dtype: str) -> Loan | None:
        """Lend memory for rows of a shape; None where they do not fit beside what is in use."""
        rows, width = shape
        geometry = Geometry(capacity_rows=rows, block_rows=rows, row_width=width, dtype=dtype)
        for _ in range(len(self.free)):
            memory = self.free.popleft()
            if memory.geometry == geometry:
                return Loan(memory, self)
            if self._nbytes + geometry.nbytes > self._capacity:
                self.close(memory)
            else:
                self.free.append(memory)
        if self._nbytes + geometry.nbytes > self._capacity:
            return None
        try:
            memory = HostMemory.create(geometry, rows=True)
        except OSError as error:
            # What has no room, of descriptors or memory, goes into the message.
            log.warning("no memory to lend: %s", error)
            return None
        self._nbytes += geometry.nbytes
        return Loan(memory, self)

    def let_go(self) -> None:
        """Let go of half of what is free; the rest is looked at again."""
        for _ in range(-(-len(self.free) // 2)):
            self.close(self.free.popleft())
        later = asyncio.get_running_loop().call_later
        self._timer = later(_KEPT_SECONDS, self.let_go) if self._nbytes else None

    def close(self, memory: HostMemory) -> None:
        self._nbytes -= memory.geometry.nbytes
        free_aside(memory.close, memory.geometry.nbytes)
