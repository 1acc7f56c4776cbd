"""Vision rows that clients computed, lent to workers on this host in place of being sent to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from tessera import wire
from tessera.transport.host import host_id
from tessera.transport.lending import Lender

log = logging.getLogger(__name__)

# After a worker on this host could not map what was lent to it, rows go into the messages for so long.
_NOT_LENT_SECONDS = 60.0


class RowLender:
    """Replaces rows in messages by handles to memory of this process, for workers on this host.

    Rows stay in the message for a worker on another host, or when ``capacity`` bytes are lent already.
    """

    def __init__(self, producer: str, *, capacity: int) -> None:
        self._lender = Lender(producer, capacity=capacity)
        self._paused_until = 0.0

    @property
    def lent(self) -> int:
        """Bytes that workers may be reading now."""
        return self._lender.lent

    def lend(
        self, items: Sequence[wire.Item], reader: wire.WorkerInfo | None, loans: ExitStack
    ) -> Sequence[wire.Item]:
        """Return the items as they are to be sent; closing ``loans`` takes back what they borrow."""
        if reader is None or reader.host != host_id() or time.monotonic() < self._paused_until:
            return items
        return [
            msgspec.structs.replace(item, images=tuple([self._lent(image, loans) for image in item.images]))
            for item in items
        ]

    def unreadable(self, reader: wire.WorkerInfo | None) -> None:
        """A worker could not read what was lent to it."""
        if reader is not None and reader.host == host_id() and time.monotonic() >= self._paused_until:
            self._paused_until = time.monotonic() + _NOT_LENT_SECONDS
            log.warning("a worker on this host could not read lent rows; they go into messages for a while")

    def _lent(self, rows: wire.Image | wire.Embeddings, loans: ExitStack) -> wire.Image | wire.Embeddings:
        if isinstance(rows, wire.Image) or not rows.handle.data:
            return rows
        loan = self._lender.lend(rows.handle)
        if loan is None:
            return rows
        loans.callback(loan.close)
        return msgspec.structs.replace(rows, handle=loan.handle, slab=loan.info)
