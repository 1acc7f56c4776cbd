"""The producer's side: one slab, and every way in which its rows can leave the process."""

from __future__ import annotations

import logging

import msgspec
import torch

from tessera.errors import TransportUnavailable
from tessera.transport.base import Transport
from tessera.transport.kinds.select import FROM_HOST_MEMORY, make_transport, select_kinds
from tessera.transport.settings import TransportSettings
from tessera.transport.slab.geometry import Geometry
from tessera.transport.slab.slab import Slab, Slot, rows_checksum
from tessera.wire import Handle, ReaderInfo, SlabInfo

_log = logging.getLogger(__name__)


class Outbox:
    """Owns the ``slab`` of one producer, whose slots it publishes.

    Not thread-safe: every call is made from one event loop.
    """

    def __init__(
        self, producer: str, geometry: Geometry, settings: TransportSettings, *, device: str = "cpu"
    ) -> None:
        self._producer = producer
        self._settings = settings
        self.kinds = select_kinds(settings.kind, slab_device=torch.device(device))
        self.slab = Slab(
            geometry,
            device=device,
            lease_seconds=settings.lease_seconds,
            mirror=not FROM_HOST_MEMORY.isdisjoint(self.kinds),
        )
        self._transports: dict[str, Transport] = {}
        try:
            for kind in self.kinds:
                self._offer(kind)
        except BaseException:
            self.close()
            raise

    async def publish(self, slot: Slot, reader: ReaderInfo) -> Handle:
        """Make a filled slot readable, by the first of the reader's kinds that leads from here to it.

        The rows must be complete: the engine has finished with them. Raises ``TransportUnavailable`` when
        the two sides have no kind in common; the slot then still belongs to the caller.
        """
        for kind in reader.kinds:
            transport = self._transports.get(kind)
            if transport is not None and transport.reaches(reader):
                checksum = rows_checksum(slot.rows) if self._settings.checksum else b""
                handle = await transport.publish(slot)
                return msgspec.structs.replace(handle, checksum=checksum) if checksum else handle
        raise TransportUnavailable(
            f"no transport leads to this reader: it can use {', '.join(reader.kinds) or 'none'}, "
            f"{self._producer} offers {', '.join(self.kinds)}"
        )

    def infos(self) -> tuple[SlabInfo, ...]:
        """How readers reach the slab, best kind first."""
        infos = (transport.info for transport in self._transports.values())
        return tuple(info for info in infos if info is not None)

    @property
    def nixl_registrations(self) -> int:
        """Regions of memory that are registered with NIXL."""
        return sum(transport.registrations for transport in self._transports.values())

    def close(self) -> None:
        """Deregister and let go of the slab; a second call does nothing."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        self.slab.close()

    def _offer(self, kind: str) -> None:
        try:
            transport = make_transport(kind, self._producer, self.slab, self._settings)
        except TransportUnavailable as error:
            if self._settings.kind != "auto":
                raise
            _log.warning("hand-off by %s is not offered: %s", kind, error)
            self.kinds = tuple(other for other in self.kinds if other != kind)
        else:
            self._transports[kind] = transport
