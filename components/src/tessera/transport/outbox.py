"""The producer's side: one slab, and every way in which its rows can leave the process."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec
import torch

from tessera.errors import ConfigError, TransportUnavailable
from tessera.transport.base import Transport
from tessera.transport.kinds.nixl import NixlOptions
from tessera.transport.kinds.select import FROM_HOST_MEMORY, make_transport, select_kinds
from tessera.transport.settings import TransportSettings
from tessera.transport.slab.geometry import Geometry
from tessera.transport.slab.slab import Slab, Slot, dtype_name, rows_checksum
from tessera.wire import Handle, ReaderInfo, SlabInfo

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxConfig:
    """A producer's slab of ``capacity_rows`` rows ``[row_width]`` and the ways out of it.

    Slots are multiples of ``block_rows``. ``nixl`` is what ``settings`` say of it by default.
    """

    producer: str
    capacity_rows: int
    block_rows: int
    row_width: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    settings: TransportSettings
    nixl: NixlOptions | None = None

    def __post_init__(self) -> None:
        if not self.producer:
            raise ConfigError("producer must not be empty")


class Outbox:
    """Owns the ``slab`` of one producer, whose slots it publishes.

    Not thread-safe: every call is made from one event loop.
    """

    def __init__(self, config: OutboxConfig) -> None:
        try:
            geometry = Geometry(
                capacity_rows=config.capacity_rows,
                block_rows=config.block_rows,
                row_width=config.row_width,
                dtype=dtype_name(config.dtype),
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.config = config
        device = torch.device(config.device)
        self._nixl = config.nixl or NixlOptions.of(config.settings)
        self.kinds = select_kinds(config.settings.kind, slab_device=device)
        self.slab = Slab(
            geometry,
            device=device,
            lease_seconds=config.settings.lease_seconds,
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
                checksum = rows_checksum(slot.rows) if self.config.settings.checksum else b""
                handle = await transport.publish(slot)
                return msgspec.structs.replace(handle, checksum=checksum) if checksum else handle
        raise TransportUnavailable(
            f"no transport leads to this reader: it can use {', '.join(reader.kinds) or 'none'}, "
            f"{self.config.producer} offers {', '.join(self.kinds)}"
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
            transport = make_transport(kind, self.config.producer, self.slab, nixl=self._nixl)
        except TransportUnavailable as error:
            if self.config.settings.kind != "auto":
                raise
            _log.warning("hand-off by %s is not offered: %s", kind, error)
            self.kinds = tuple(other for other in self.kinds if other != kind)
        else:
            self._transports[kind] = transport
