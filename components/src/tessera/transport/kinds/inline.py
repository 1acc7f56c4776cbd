"""Hand-off by carrying the bytes in the handle; reaches every peer and costs a copy on each side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from tessera.dtypes import FLOATS
from tessera.errors import HandOffError
from tessera.transport.slab.geometry import check_shape
from tessera.transport.slab.slab import Slot, destination, dtype_name
from tessera.wire import Handle, ReaderInfo, SlabInfo

if TYPE_CHECKING:
    from tessera.transport.base import Destination


class InlineTransport:
    """Kind ``inline``; see ``Transport`` for the contract. The slot is free as soon as it is published."""

    kind = "inline"
    registrations = 0

    def __init__(self, producer: str) -> None:
        self._producer = producer

    @property
    def info(self) -> SlabInfo | None:
        return None

    def reaches(self, reader: ReaderInfo) -> bool:
        return True

    async def publish(self, slot: Slot) -> Handle:
        if slot.state != "held":
            raise HandOffError("only a slot that was neither published nor freed can be published")
        rows = slot.rows
        handle = Handle(
            kind=self.kind,
            producer=self._producer,
            slab="",
            offset=0,
            shape=slot.shape,
            dtype=dtype_name(rows.dtype),
            lease=slot.lease,
            data=rows.cpu().view(torch.uint8).numpy().tobytes(),
        )
        slot.free()
        return handle

    def connect(self, info: SlabInfo) -> InlineSlab:
        return INLINE

    def close(self) -> None:
        """Nothing is held."""


class InlineSlab:
    """Implements ``PeerSlab`` for rows that came with their handle; no slab is reached and nothing leased."""

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
