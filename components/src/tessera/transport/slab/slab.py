"""The slab: memory allocated once, in which every result of the vision engine lives until it is read.

A slot is acquired, filled by the engine, and either freed or leased. A sweep takes a leased slot back when
its reader has acknowledged the lease, or when the lease has run out. It runs on a timer, and only while
something is leased: every 2 ms while a caller waits for space, every 100 ms otherwise.

Both sides name the types of rows, check where they are copied to, and copy them here.
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import torch
from blake3 import blake3

from tessera.dtypes import FLOATS
from tessera.errors import HandOffError
from tessera.transport.slab.device_memory import DeviceMemory, finished, index_of, pin, unpin
from tessera.transport.slab.geometry import Geometry
from tessera.transport.slab.memory import HostMemory, fence
from tessera.transport.slab.space import Space
from tessera.wire import Handle

if TYPE_CHECKING:
    from tessera.transport.base import Destination

# Seconds between two sweeps while something is leased: with and without a caller that waits for space.
_SWEEP_WAITING: Final = 0.002
_SWEEP_IDLE: Final = 0.1


# Looked up several times in each hand-off.
_TORCH: Final = {name: dtype.torch for name, dtype in FLOATS.items()}

CHUNK_BYTES: Final = 2 << 20
"""What ``copy_rows`` moves before it lets other work of the loop run."""


@dataclass(slots=True, eq=False)
class Slot:
    """Rows ``[rows, row_width]`` of the slab, owned by whoever acquired them until they are published.

    They begin with the slab's block ``block``. ``deadline`` is when the lease ends.

    After ``free`` or after its lease has ended the memory belongs to others: drop every view of ``rows``.
    """

    slab: Slab
    lease: int
    block: int
    blocks: int
    shape: tuple[int, int]
    rows: torch.Tensor
    state: Literal["held", "leased", "free"] = "held"
    deadline: float = 0.0

    def free(self) -> None:
        """Give the memory back without publishing it; does nothing to a published or freed slot."""
        if self.state == "held":
            self.state = "free"
            self.slab.take_back(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabStats:
    """A snapshot; sizes in bytes, counts since the slab was made except where they say otherwise.

    ``leased`` and ``held`` are the slots published and not yet published at this moment, ``waiting`` the
    callers that wait for space now.
    """

    capacity_bytes: int
    used_bytes: int
    leased: int
    held: int
    waiting: int
    waits: int
    published: int
    released: int
    expired: int


class Slab:
    """``capacity_rows`` rows on ``device``, handed out in multiples of ``block_rows``.

    A slab on a CUDA device has its lease words in host memory and, with ``mirror``, a pinned host copy of
    its rows for the readers that cannot reach the device. Not thread-safe: every call is made from one
    event loop, except that the engine's thread writes to the rows of held slots.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        device: torch.device | str = "cpu",
        lease_seconds: float,
        mirror: bool = True,
    ) -> None:
        self.geometry = geometry
        self.device = torch.device(device)
        self.lease_seconds = lease_seconds
        self.device_memory: DeviceMemory | None = None
        on_host = self.device.type == "cpu"
        self.memory = HostMemory.create(geometry, rows=on_host or mirror)
        self.name = self.memory.slab
        """32 hexadecimal digits, new for every slab."""
        if on_host:
            assert self.memory.rows is not None
            self.rows = self.memory.rows
        else:
            self.device_memory = DeviceMemory.allocate(geometry.nbytes, index_of(self.device))
            shape = (geometry.capacity_rows, geometry.row_width)
            self.rows = self.device_memory.tensor(shape, _TORCH[geometry.dtype])
            if self.memory.rows is not None:
                pin(self.memory.rows)
        self._space = Space(geometry.blocks, name="slab")
        # A random start keeps a handle that survived a restart from matching a lease of the new slab.
        self._next_lease = secrets.randbelow(2**62) + 1
        self._held = 0
        self._leased: dict[int, Slot] = {}
        self._sources: list[Callable[[], Iterable[int]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._published = self._expired = 0
        self._closed = False

    @property
    def host_rows(self) -> torch.Tensor:
        """The rows in host memory ``[capacity_rows, row_width]``: the slab itself, or its mirror."""
        if self.memory.rows is None:
            raise HandOffError("this slab has no host copy")
        return self.memory.rows

    async def acquire(self, rows: int, *, timeout: float) -> Slot:
        """A slot for ``rows`` rows, waiting at most ``timeout`` seconds for it, first come first served.

        Raises ``Overloaded`` when none came free in time and ``HandOffError`` at once when the slab is
        closed or too small for it.
        """
        if rows <= 0:
            raise ValueError(f"a slot needs at least one row, not {rows}")
        if self._closed:
            raise HandOffError("the slab is closed")
        if rows > self.geometry.capacity_rows:
            raise HandOffError(f"{rows} rows can never fit a slab of {self.geometry.capacity_rows} rows")
        blocks = -(-rows // self.geometry.block_rows)
        if (block := self._space.try_take(blocks)) is None:
            block = await self._wait_for(blocks, timeout)
        self._held += 1
        lease = self._next_lease
        self._next_lease += 1
        first, shape = block * self.geometry.block_rows, (rows, self.geometry.row_width)
        return Slot(self, lease, block, blocks, shape, self.rows[first : first + rows])

    async def _wait_for(self, blocks: int, timeout: float) -> int:
        self.sweep()
        self._arm(_SWEEP_WAITING)
        return await self._space.take(blocks, timeout=timeout)

    async def stage(self, slot: Slot) -> None:
        """Bring the slot's part of ``host_rows`` up to date; returns at once when the slab is host memory."""
        if self.device.type == "cpu":
            return
        first = slot.block * self.geometry.block_rows
        self.host_rows[first : first + slot.shape[0]].copy_(slot.rows, non_blocking=True)
        await finished(self.device)

    def lease(self, slot: Slot, kind: str, producer: str) -> Handle:
        """Let peers that reach the slab by ``kind`` read a slot from now on; its handle.

        Raises ``HandOffError`` when it was published or freed before.
        """
        if slot.state != "held":
            raise HandOffError(f"a slot that is {slot.state} cannot be published")
        slot.state = "leased"
        slot.deadline = asyncio.get_running_loop().time() + self.lease_seconds
        fence()
        self.memory.lease[slot.block] = slot.lease
        self._held -= 1
        self._leased[slot.lease] = slot
        self._published += 1
        self._arm(_SWEEP_WAITING if self._space.waiting else _SWEEP_IDLE)
        return Handle(
            kind=kind,
            producer=producer,
            slab=self.name,
            offset=slot.block * self.geometry.block_bytes,
            shape=slot.shape,
            dtype=self.geometry.dtype,
            lease=slot.lease,
        )

    def take_back(self, slot: Slot) -> None:
        """Called by a slot that was never published."""
        self._held -= 1
        if not self._closed:
            self._space.give(slot.block, slot.blocks)

    def add_source(self, source: Callable[[], Iterable[int]]) -> None:
        """Ask ``source`` on every sweep for leases that readers have finished with."""
        self._sources.append(source)

    def release(self, lease: int) -> bool:
        """End a lease; false when it had ended before."""
        slot = self._leased.pop(lease, None)
        if slot is None:
            return False
        # The word goes before the memory can be handed out again: a reader that finds its lease in
        # place after copying then knows that nobody had begun to write while it copied.
        self.memory.lease[slot.block] = 0
        fence()
        self._space.give(slot.block, slot.blocks)
        return True

    def sweep(self) -> int:
        """Take back the slots whose readers have finished or whose leases have run out; how many."""
        before = len(self._leased)
        for source in self._sources:
            for lease in source():
                self.release(lease)
        now = asyncio.get_running_loop().time()
        acks = self.memory.ack
        for slot in list(self._leased.values()):
            acknowledged = acks[slot.block] == slot.lease
            if acknowledged or now >= slot.deadline:
                self._expired += not acknowledged
                self.release(slot.lease)
        return before - len(self._leased)

    async def drain(self, *, timeout: float) -> bool:
        """Wait until no lease is outstanding; false when ``timeout`` seconds were not enough."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self._leased:
            self.sweep()
            if self._leased:
                if asyncio.get_running_loop().time() >= deadline:
                    return False
                await asyncio.sleep(_SWEEP_WAITING)
        return True

    def stats(self) -> SlabStats:
        return SlabStats(
            capacity_bytes=self.geometry.nbytes,
            used_bytes=self._space.used * self.geometry.block_bytes,
            leased=len(self._leased),
            held=self._held,
            waiting=self._space.waiting,
            waits=self._space.waits,
            published=self._published,
            released=self._published - self._expired - len(self._leased),
            expired=self._expired,
        )

    def close(self) -> None:
        """Refuse further slots and let go of the memory; views that callers still hold stay valid."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._space.fail_waiters(HandOffError("the slab is closed"))
        self._leased.clear()
        self._sources.clear()
        if self.device.type == "cuda" and self.memory.rows is not None:
            unpin(self.memory.rows)
        self.rows = torch.empty((0, self.geometry.row_width), dtype=self.rows.dtype)
        self.device_memory = None
        self.memory.close()

    def _arm(self, delay: float) -> None:
        if self._closed or not self._leased:
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + delay:
                return
            self._timer.cancel()
        self._timer = loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self.sweep()
        finally:
            self._arm(_SWEEP_WAITING if self._space.waiting else _SWEEP_IDLE)


def destination(handle: Handle, into: Destination) -> torch.Tensor:
    """Make the tensor that a handle's rows are copied to; ``HandOffError`` unless they fill it exactly."""
    dtype, shape = _TORCH[handle.dtype], handle.shape
    rows = into(shape, dtype)
    if rows.dtype != dtype or rows.shape != shape or not rows.is_contiguous():
        there = f"{rows.dtype} {tuple(rows.shape)} of strides {rows.stride()}"
        raise HandOffError(f"the handle's rows are {dtype} {shape}, the destination's {there}")
    return rows


async def copy_rows(source: torch.Tensor, into: torch.Tensor) -> None:
    """Copy contiguous ``[rows, row_width]`` in pieces, between which other work of the event loop runs."""
    on_host = source.device.type == "cpu" and into.device.type == "cpu"
    rows = max(1, CHUNK_BYTES // (source.shape[1] * source.element_size()))
    for first in range(0, source.shape[0], rows):
        if first:
            await asyncio.sleep(0)
        piece, target = source[first : first + rows], into[first : first + rows]
        if on_host:
            # torch would split the copy over its threads and wait for the slowest: on a busy host that
            # costs milliseconds for what one thread moves in tens of microseconds.
            ctypes.memmove(target.data_ptr(), piece.data_ptr(), piece.nbytes)
        else:
            target.copy_(piece)


def rows_checksum(rows: torch.Tensor) -> bytes:
    """The 16-byte blake3 hash of ``[rows, row_width]``; a tensor on a device is copied to the host for it."""
    return blake3(rows.detach().contiguous().cpu().view(torch.uint8).numpy().data).digest(16)
