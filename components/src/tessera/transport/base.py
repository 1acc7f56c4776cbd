"""The transport seam: how vision rows cross from the worker that made them to the one that reads them.

The producer owns one slab, allocated and registered once. A slot of it is leased for one image,
published as a ``Handle`` of a few hundred bytes, and free again when the reader releases it or when the
lease runs out. Kinds differ only in how a reader reaches the bytes:

===========  =========================================================================
``cuda_ipc`` maps the producer's GPU slab once, copies device to device
``shm``      maps the producer's host slab once, copies in memory
``nixl``     reads by descriptor through raw NIXL agents, from another host too
``inline``   carries the bytes in the handle itself
===========  =========================================================================

A reader copies first and releases afterwards; ``release`` says whether the lease was still good when
the copy had finished. If it was not, the copy may hold another image's rows and must be thrown away.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Final

from tessera.errors import HandOffError
from tessera.transport.slab.geometry import Geometry
from tessera.wire import Handle, ReaderInfo, SlabInfo

if TYPE_CHECKING:
    import torch

    from tessera.transport.slab.slab import Slab, Slot

    Destination = Callable[[tuple[int, int], torch.dtype], torch.Tensor]
    """Makes the contiguous tensor of this shape and dtype that rows are copied into."""

KINDS: Final = ("cuda_ipc", "shm", "nixl", "inline")
"""Every kind, in the order in which ``auto`` prefers them."""


class Transport:
    """One kind of hand-off; the same object publishes this process's slab and connects to its peers'.

    Not thread-safe: every call is made from the event loop that created it.
    """

    kind: ClassVar[str]
    info: SlabInfo | None = None
    """How readers reach this process's slab, or None when it has none or the kind needs none."""

    def __init__(self, producer: str, slab: Slab | None = None) -> None:
        self._producer = producer
        self._slab = slab

    @property
    def registrations(self) -> int:
        """Regions of this process's memory that are registered for peers or reads."""
        return 0

    def reaches(self, reader: ReaderInfo) -> bool:
        """Whether the reader, if it uses this kind, can get at this process's slab."""
        return True

    async def publish(self, slot: Slot) -> Handle:
        """Lease a filled slot to peers; raises ``HandOffError`` for one that is not held any more."""
        raise NotImplementedError

    def connect(self, info: SlabInfo) -> PeerSlab:
        """Map or register a peer's slab; raises ``TransportUnavailable`` when it cannot be reached."""
        raise NotImplementedError

    def close(self) -> None:
        """Deregister and forget; a second call does nothing. Peers' slabs are closed before it."""


class PeerSlab:
    """A peer's slab, as one kind reaches it.

    A slab's words, not a call, carry leases and releases, so that neither side waits for the other. A handle
    is data from another process: its kind, producer, shape, dtype, byte count and bounds are checked before
    any memory is touched.
    """

    def __init__(self, info: SlabInfo, geometry: Geometry) -> None:
        self._info: SlabInfo | None = info
        self._geometry = geometry

    async def fetch(self, handle: Handle, into: Destination) -> torch.Tensor:
        """Copy the rows into the tensor that ``into`` makes once the handle has been checked; that tensor.

        Raises ``HandOffError`` for a handle that does not fit the slab or the tensor, ``LeaseExpired`` when
        the rows were already reclaimed, ``TransportUnavailable`` when the peer is gone.
        """
        raise NotImplementedError

    async def release(self, handle: Handle) -> bool:
        """Give the slot back; true when the lease was good until now. Raises like ``fetch``."""
        raise NotImplementedError

    def abandon(self, handle: Handle) -> None:
        """Give the slot back without having read it, at once and as well as it can be done; never raises."""
        with suppress(HandOffError):
            self._give_back(self._geometry.check(handle, self._info), handle)

    def _give_back(self, block: int, handle: Handle) -> None:
        """Tell the producer that this reader has finished with a handle that has been checked."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the slab; a second call does nothing."""
        self._info = None
