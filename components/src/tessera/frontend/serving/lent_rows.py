"""Handing vision rows that a client sent to the worker that reads them, by shared memory where that works."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec

from tessera import wire
from tessera.transport.host import host_id
from tessera.transport.lending import Lender

log = logging.getLogger(__name__)

# After a worker on this host could not map what was lent to it, rows go into the messages for so long.
_GIVEN_UP_SECONDS = 60.0


class RowLender:
    """Replaces rows in messages by handles to memory of this process, for workers on this host.

    Rows stay in the message for a worker on another host, or when ``capacity`` bytes are lent already.
    """

    def __init__(self, producer: str, *, capacity: int) -> None:
        self._lender = Lender(producer, capacity=capacity)
        self._until = 0.0

    @property
    def lent(self) -> int:
        """Bytes that workers may be reading now."""
        return self._lender.lent

    @contextmanager
    def lending(
        self, items: Sequence[wire.Item], reader: wire.WorkerInfo | None
    ) -> Iterator[tuple[wire.Item, ...]]:
        """The items as they are to be sent; afterwards nothing is lent any more."""
        with ExitStack() as loans:
            if reader is None or reader.host != host_id() or time.monotonic() < self._until:
                yield tuple(items)
            else:
                yield tuple(self._item(item, loans) for item in items)

    def give_up(self, reader: wire.WorkerInfo | None) -> None:
        """A worker could not read what was lent to it."""
        if reader is not None and reader.host == host_id() and time.monotonic() >= self._until:
            self._until = time.monotonic() + _GIVEN_UP_SECONDS
            log.warning("a worker on this host could not read lent rows; they go into messages for a while")

    def _item(self, item: wire.Item, loans: ExitStack) -> wire.Item:
        images = tuple(
            self._lent(image, loans) if isinstance(image, wire.Embeddings) else image for image in item.images
        )
        return msgspec.structs.replace(item, images=images)

    def _lent(self, rows: wire.Embeddings, loans: ExitStack) -> wire.Embeddings:
        loan = self._lender.lend(rows.handle)
        if loan is None:
            return rows
        loans.callback(loan.close)
        return msgspec.structs.replace(rows, handle=loan.handle, slab=loan.info)
