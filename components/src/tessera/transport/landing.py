"""Memory of a process that others on its host write rows to, in place of sending them.

A landing is a slab of one slot, whose owner asks for rows and reads them where they lie. Nothing is leased:
the owner alone reads, and does not use memory again that somebody may still be writing to.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from typing import Final

from tessera.dtypes import Float32Array
from tessera.transport.slab.geometry import Geometry, decode_address, slab_info
from tessera.transport.slab.memory import HostMemory, ShmAddress
from tessera.wire import SlabInfo

KIND: Final = "shm"
# Pages differ in their rows: memory for one serves others of about its size.
_STEP_BYTES: Final = 1 << 20


def land(info: SlabInfo, rows: memoryview) -> None:
    """Write float32 rows to a peer's landing; raises ``TransportUnavailable`` where that cannot be done."""
    address = decode_address(info, ShmAddress)
    HostMemory.fill(address.memory, info.slab, address.geometry, rows)


class Landing:
    """Memory for the rows of one reply, until ``close``."""

    def __init__(self, memory: HostMemory, owner: Landings) -> None:
        self._memory: HostMemory | None = memory
        self._owner = owner
        address = ShmAddress(memory=memory.address(), geometry=memory.geometry)
        self.info = slab_info(KIND, owner.producer, memory.slab, address)

    def rows(self, count: int) -> Float32Array:
        """Return the rows ``[count, row_width]`` that were written; the memory is used again after them."""
        memory, self._memory = self._memory, None
        assert memory is not None
        whole, width = memory.array(), memory.geometry.row_width
        whole.flags.writeable = False
        # The last of its views may go on any thread.
        weakref.finalize(whole, self._owner.free.append, memory).atexit = False
        return whole[: count * width].reshape(count, width)

    def untouched(self) -> None:
        """Give back memory that nobody has written to, or will."""
        if self._memory is not None:
            self._owner.free.append(self._memory)
            self._memory = None

    def close(self) -> None:
        """Let go of the memory if nothing became of it: somebody may still write to it."""
        if self._memory is not None:
            self._owner.close(self._memory)
            self._memory = None


# After each half of what is free is let go: an idle process keeps none.
_KEPT_SECONDS: Final = 30.0


class Landings:
    """Gives landings of at most ``capacity`` bytes in all, and keeps their memory for a while.

    To write 13 MB into new memory takes 12 ms of a processor, into what is there already 4. Owned by one
    event loop, but for ``free``: what is there and not in use.
    """

    def __init__(self, producer: str, *, capacity: int) -> None:
        self.producer = producer
        self.free: deque[HostMemory] = deque()
        self._capacity = capacity
        self._nbytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def take(self, rows: int, width: int) -> Landing | None:
        """Return memory for float32 ``[rows, width]``; None where there is no room for it."""
        step = max(1, _STEP_BYTES // (4 * width))
        capacity = -(-rows // step) * step
        geometry = Geometry(capacity_rows=capacity, block_rows=capacity, row_width=width, dtype="float32")
        for _ in range(len(self.free)):
            memory = self.free.popleft()
            if memory.geometry == geometry:
                return Landing(memory, self)
            if self._nbytes + geometry.nbytes > self._capacity:
                self.close(memory)
            else:
                self.free.append(memory)
        if self._nbytes + geometry.nbytes > self._capacity:
            return None
        self._nbytes += geometry.nbytes
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_KEPT_SECONDS, self.let_go)
        return Landing(HostMemory.create(geometry, rows=True), self)

    def let_go(self) -> None:
        """Let go of half of what is free; the rest is looked at again."""
        for _ in range(-(-len(self.free) // 2)):
            self.close(self.free.popleft())
        later = asyncio.get_running_loop().call_later
        self._timer = later(_KEPT_SECONDS, self.let_go) if self._nbytes else None

    def close(self, memory: HostMemory) -> None:
        """Let go of memory of a landing."""
        self._nbytes -= memory.geometry.nbytes
        memory.close()
