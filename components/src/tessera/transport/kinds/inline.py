"""Hand-off by carrying the bytes in the handle; reaches every peer and costs a copy on each side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from tessera.dtypes import FLOATS
from tessera.errors import HandOffError
from tessera.transport.base import PeerSlab, Transport
from tessera.transport.slab.geometry import check_shape
from tessera.transport.slab.slab import Slot, destination
from tessera.wire import Handle, SlabInfo

if TYPE_CHECKING:
    from tessera.transport.base import Destination


class InlineTransport(Transport):
    """Kind ``inline``, of one ``INLINE`` for all peers. The slot is free as soon as it is published."""

    kind = "inline"

    async def publish(self, slot: Slot) -> Handle:
        if slot.state != "held":
            raise HandOffError("only a slot that was neither published nor freed can be published")
        handle = Handle(
            kind=self.kind,
            producer=self._producer,
            slab="",
            offset=0,
            shape=slot.shape,
            dtype=slot.slab.geometry.dtype,
            lease=slot.lease,
            data=slot.rows.cpu().view(torch.uint8).numpy().tobytes(),
        )
        slot.free()
        return handle

    def connect(self, info: SlabInfo) -> PeerSlab:
        return INLINE


class InlineSlab(PeerSlab):
    """Rows that came with their handle; no slab is reached and nothing leased."""

    def __init__(self) -> None:
        """Belong to no slab."""

    async def fetch(self, handle: Handle, into: Destination) -> torch.Tensor:
        _check(handle)
        rows = destination(handle, into)
        target = rows if rows.device.type == "cpu" else torch.empty_like(rows, device="cpu")
        raw: Any = target.view(torch.uint8).view(-1).numpy()
        memoryview(raw)[:] = handle.data
        if target is not rows:
            rows.copy_(target)
        return rows

    async def release(self, handle: Handle) -> bool:
        _check(handle)
        return True

    def abandon(self, handle: Handle) -> None:
        """Nothing is leased."""

    def close(self) -> None:
        """Nothing is held."""


INLINE: Final = InlineSlab()
"""Reads every producer's inline handles."""


def _check(handle: Handle) -> None:
    if handle.kind != InlineTransport.kind:
        raise HandOffError(f"a handle of kind {handle.kind!r} reached the inline transport")
    rows = check_shape(handle)
    if handle.slab or handle.offset:
        raise HandOffError("an inline handle names a place in a slab")
    expected = rows * handle.shape[1] * FLOATS[handle.dtype].itemsize
    if len(handle.data) != expected:
        raise HandOffError(f"the handle carries {len(handle.data)} bytes, its shape takes {expected}")
