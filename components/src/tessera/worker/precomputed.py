"""Vision rows that a client computed itself, on their way from a frontend to a worker."""

from __future__ import annotations

import torch

from tessera import wire
from tessera.dtypes import FLOATS
from tessera.errors import HandOffError, InvalidInput, LeaseExpired
from tessera.transport.base import PeerSlab, Transport
from tessera.transport.kinds.inline import INLINE, InlineTransport
from tessera.transport.kinds.shm import ShmTransport
from tessera.transport.slab.geometry import check_shape, unknown_slab
from tessera.worker.metrics import WorkerMetrics


class PrecomputedRows:
    """Vision rows that a client computed itself, read from the frontend by the handle that came along.

    Maps one slab of one slot at a time, and keeps none of them mapped.
    """

    def __init__(self, reader: str, *, row_width: int, dtype: str, metrics: WorkerMetrics) -> None:
        self._row_width = row_width
        self._dtype = FLOATS[dtype].torch
        self._metrics = metrics
        self._transports: dict[str, Transport] = {
            ShmTransport.kind: ShmTransport(reader),
            InlineTransport.kind: InlineTransport(reader),
        }

    async def fetch(self, embeddings: wire.Embeddings) -> torch.Tensor:
        """``[rows, row_width]`` on the CPU in the worker's own dtype.

        Raises ``InvalidInput`` for rows of another width, ``HandOffError`` for a handle that fits no memory,
        ``TransportUnavailable`` when the memory cannot be mapped, ``LeaseExpired`` when the frontend took it
        back while it was copied.
        """
        handle = embeddings.handle
        transport = self._transports.get(handle.kind)
        if transport is None:
            raise HandOffError(f"rows of kind {handle.kind!r} are not taken from a frontend")
        check_shape(handle)
        if handle.shape[1] != self._row_width:
            raise InvalidInput(
                f"rows of {handle.shape[1]} values are not {self._row_width} wide", param=embeddings.param
            )
        try:
            rows = await self._copied(transport, handle, embeddings.slab)
        except HandOffError as error:
            self._metrics.transfers.labels(handle.kind, error.code).inc()
            raise
        self._metrics.transfers.labels(handle.kind, "ok").inc()
        self._metrics.transfer_bytes.labels(handle.kind).inc(rows.nbytes)
        return rows.to(self._dtype)

    async def _copied(
        self, transport: Transport, handle: wire.Handle, slab: wire.SlabInfo | None
    ) -> torch.Tensor:
        source: PeerSlab
        if slab is not None:
            if (slab.kind, slab.slab, slab.producer) != (handle.kind, handle.slab, handle.producer):
                raise HandOffError("the handle names another slab than the one it came with")
            source = transport.connect(slab)
        elif handle.kind == InlineTransport.kind:
            source = INLINE
        else:
            raise unknown_slab(handle)
        try:
            rows = await source.fetch(handle, lambda shape, dtype: torch.empty(shape, dtype=dtype))
            if not await source.release(handle):
                raise LeaseExpired("the rows were taken back while they were copied")
            return rows
        except BaseException:
            source.abandon(handle)
            raise
        finally:
            source.close()
