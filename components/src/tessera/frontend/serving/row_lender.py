"""Memory that is shared with workers on this host, in place of sending rows: clients' own, and replies'."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from tessera import wire
from tessera.transport.host import host_id
from tessera.transport.lending import Lender, Loan

log = logging.getLogger(__name__)

# After a worker on this host could not reach what was lent to it, rows go into the messages for so long.
_NOT_LENT_SECONDS = 60.0


class RowLender:
    """Lends memory of this process to workers on this host, in place of rows in messages.

    Rows stay in the message for a worker on another host, or when ``capacity`` bytes are lent already.
    """

    def __init__(self, producer: str, *, capacity: int) -> None:
        self._lender = Lender(producer, capacity=capacity)
        self._paused_until = 0.0

    @property
    def lent(self) -> int:
        """Bytes of memory that is lent now, or has a reply in it that is in use."""
        return self._lender.lent

    def lend(
        self, items: Sequence[wire.Item], reader: wire.WorkerInfo | None, loans: ExitStack
    ) -> Sequence[wire.Item]:
        """Return the items as they are to be sent; closing ``loans`` takes back what they borrow."""
        if not self._reaches(reader):
            return items
        return [
            msgspec.structs.replace(item, images=tuple([self._lent(image, loans) for image in item.images]))
            for item in items
        ]

    def landing(self, nbytes: int, writer: wire.WorkerInfo | None, loans: ExitStack) -> Loan | None:
        """Lend memory that a worker writes so many bytes of rows to; None where they come in its reply."""
        loan = self._lender.landing(nbytes) if self._reaches(writer) else None
        if loan is not None:
            loans.callback(loan.close)
        return loan

    def unreachable(self, worker: wire.WorkerInfo | None) -> None:
        """A worker could not reach what was lent to it."""
        if self._reaches(worker):
            self._paused_until = time.monotonic() + _NOT_LENT_SECONDS
            log.warning("a worker on this host could not reach lent rows; they go into messages for a while")

    def _reaches(self, worker: wire.WorkerInfo | None) -> bool:
        here = worker is not None and worker.host == host_id()
        return here and time.monotonic() >= self._paused_until

    def _lent(self, rows: wire.Image | wire.Embeddings, loans: ExitStack) -> wire.Image | wire.Embeddings:
        if isinstance(rows, wire.Image) or not rows.handle.data:
            return rows
        loan = self._lender.take(rows.handle.shape, rows.handle.dtype)
        if loan is None:
            return rows
        loans.callback(loan.close)
        return msgspec.structs.replace(rows, handle=loan.lease(rows.handle), slab=loan.info)
