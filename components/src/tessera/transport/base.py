"""The Transport seam: how vision rows cross from the worker that made them to the one that reads them.

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

from typing import TYPE_CHECKING, Final, Protocol

from tessera.wire import Handle, SlabInfo

if TYPE_CHECKING:
    import torch

    from tessera.transport.slab.slab import Slot

KINDS: Final = ("cuda_ipc", "shm", "nixl", "inline")
"""Every kind, in the order in which ``auto`` prefers them."""


class Transport(Protocol):
    """One kind of hand-off; the same object serves producers (``publish``) and readers (the rest).

    A slab's words, not a call, carry leases and releases, so that neither side waits for the other. Not
    thread-safe: every call is made from the event loop that created it. A handle is data from another
    process: ``fetch`` checks shape, dtype, byte count and bounds before it touches memory.
    """

    @property
    def kind(self) -> str: ...

    def describe(self) -> SlabInfo | None:
        """How readers reach this process's slab, or None when it has none or the kind needs none."""
        ...

    def connect(self, info: SlabInfo) -> None:
        """Map or register a peer's slab, once; raises ``TransportUnavailable`` when it cannot be reached."""
        ...

    def disconnect(self, slab: str) -> None:
        """Forget a peer's slab; unknown names are ignored."""
        ...

    async def publish(self, slot: Slot) -> Handle:
        """Make a filled, leased slot readable by peers."""
        ...

    def check(self, handle: Handle) -> None:
        """Raise what ``fetch`` would raise for a handle that fits no slab, before memory is found for it."""
        ...

    async def fetch(self, handle: Handle, into: torch.Tensor) -> None:
        """Copy the rows into ``into`` (``handle.shape``, same dtype, contiguous).

        Raises ``HandOffError`` for a handle that does not fit its slab or ``into``, ``LeaseExpired`` when the
        rows were already reclaimed, ``TransportUnavailable`` when the slab is unknown or the peer is gone.
        """
        ...

    async def release(self, handle: Handle) -> bool:
        """Give the slot back; true when the lease was good until now."""
        ...

    def abandon(self, handle: Handle) -> None:
        """Give the slot back without having read it, at once and as well as it can be done; never raises."""
        ...

    def close(self) -> None:
        """Unmap, deregister and forget; a second call does nothing."""
        ...
