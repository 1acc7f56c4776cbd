"""The reader's side: where each producer's rows come from, and how."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from tessera.errors import HandOffError, LeaseExpired, TransportUnavailable
from tessera.transport.base import PeerSlab, Transport
from tessera.transport.host import device_ids, host_id
from tessera.transport.kinds.inline import INLINE
from tessera.transport.kinds.select import make_transport, select_kinds
from tessera.transport.settings import TransportSettings
from tessera.transport.slab.geometry import unknown_slab
from tessera.transport.slab.slab import rows_checksum
from tessera.wire import Handle, ReaderInfo, SlabInfo

if TYPE_CHECKING:
    from tessera.transport.base import Destination

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peer:
    infos: dict[str, SlabInfo] = field(default_factory=dict)
    connected: str | None = None
    failed: dict[str, float] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)
    route: str | None = None


def on_device(device: torch.device) -> Destination:
    """Return what allocates rows on the device."""
    return lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)


on_cpu: Final = on_device(torch.device("cpu"))


class Inbox:
    """Reads the rows that producers publish. Not thread-safe: every call is made from one event loop.

    ``reader`` names this process to its peers. A kind that failed for a producer is tried again after
    ``retry_seconds``.
    """

    def __init__(self, reader: str, settings: TransportSettings, *, retry_seconds: float = 60.0) -> None:
        self.reader = reader
        self._settings = settings
        self._retry_seconds = retry_seconds
        self.kinds = select_kinds(settings.kind)
        self._transports: dict[str, Transport] = {}
        # By kind and name of the slab. Looked up anew for each step of a fetch: a slab may be let go, and
        # reached again, while its rows are copied.
        self._slabs: dict[tuple[str, str], PeerSlab] = {}
        self._peers: dict[str, _Peer] = {}
        self._closed = False

    def connect(self, producer: str, infos: Iterable[SlabInfo]) -> None:
        """Take note of a producer's slab and reach it by the best kind that works.

        What a producer said before is replaced; the same infos again change nothing.
        """
        offered = {info.kind: info for info in infos if info.producer == producer}
        peer = self._peers.get(producer)
        if peer is not None and peer.infos == offered:
            return
        if peer is not None:
            self._disconnect(peer)
        peer = self._peers[producer] = _Peer(infos=offered)
        self._reach(producer, peer)

    def reader_info(self, producer: str) -> ReaderInfo:
        """What to tell the producer about this reader: the kind that reaches its slab, then ``inline``.

        Raises ``TransportUnavailable`` when nothing reaches it and ``inline`` is not allowed.
        """
        peer = self._peers.get(producer)
        if peer is not None and (
            peer.connected is None or any(time.monotonic() >= until for until in peer.failed.values())
        ):
            self._reach(producer, peer)
        connected = () if peer is None or peer.connected is None else (peer.connected,)
        kinds = (*connected, "inline") if "inline" in self.kinds else connected
        if not kinds:
            raise TransportUnavailable(f"{' and '.join(self.kinds)} cannot reach {producer}")
        return ReaderInfo(host=host_id(), devices=device_ids(), kinds=kinds)

    async def fetch(self, handle: Handle, into: Destination = on_cpu) -> torch.Tensor:
        """The handle's rows ``[rows, row_width]``, copied out of the slab, whose slot is then released.

        ``into`` is a function of shape and dtype that makes the tensor, as ``on_device`` gives one.

        Raises ``LeaseExpired`` when the copy cannot be trusted, ``TransportUnavailable`` when the kind does
        not work for this producer (and is not offered to it again for a while), ``HandOffError`` for a
        handle that fits no slab, ``Overloaded`` when this reader's own staging memory stays full. Nothing
        is leased afterwards in any of these cases, nor after a cancellation, as far as the producer can
        still be reached.
        """
        try:
            rows = await self._slab(handle).fetch(handle, into)
            good = await self._slab(handle).release(handle)
        except BaseException as error:
            self.discard(handle)
            if isinstance(error, TransportUnavailable):
                self._note_failure(handle, error)
            raise
        if not good:
            raise LeaseExpired(f"lease {handle.lease} of {handle.producer} ended while its rows were copied")
        if handle.checksum and rows_checksum(rows) != handle.checksum:
            raise HandOffError(
                f"the rows of lease {handle.lease} of {handle.producer} are not what was published"
            )
        self._note_route(handle.producer, handle.kind)
        return rows

    def forget(self, producer: str) -> None:
        """Let go of a producer that went away."""
        peer = self._peers.pop(producer, None)
        if peer is not None:
            self._disconnect(peer)

    @property
    def peers(self) -> int:
        """Producers whose slabs are known here."""
        return len(self._peers)

    @property
    def nixl_registrations(self) -> int:
        """Regions of memory that are registered with NIXL."""
        return sum(transport.registrations for transport in self._transports.values())

    def routes(self) -> Mapping[str, str]:
        """The kind that each producer's rows came by last."""
        return {name: peer.route for name, peer in self._peers.items() if peer.route is not None}

    def close(self) -> None:
        """Unmap and deregister everything; a second call does nothing."""
        self._closed = True
        self._peers.clear()
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()

    def _slab(self, handle: Handle) -> PeerSlab:
        """What the handle's rows are read from; raises ``TransportUnavailable`` for an unknown slab."""
        if self._closed:
            raise HandOffError("the inbox is closed")
        if handle.kind not in self.kinds:
            raise HandOffError(
                f"a handle of kind {handle.kind!r} reached a reader that uses {', '.join(self.kinds)}"
            )
        if handle.kind == "inline":
            return INLINE
        slab = self._slabs.get((handle.kind, handle.slab))
        if slab is None:
            raise unknown_slab(handle)
        return slab

    def discard(self, handle: Handle) -> None:
        """Give back a slot whose rows are no longer wanted."""
        with suppress(HandOffError):
            self._slab(handle).abandon(handle)

    def _open(self, kind: str, info: SlabInfo) -> None:
        """Connect a slab unless it is connected; raises ``TransportUnavailable``."""
        if (kind, info.slab) in self._slabs:
            return
        if self._closed:
            raise HandOffError("the inbox is closed")
        transport = self._transports.get(kind)
        if transport is None:
            transport = make_transport(kind, self.reader, None, self._settings)
            self._transports[kind] = transport
        self._slabs[kind, info.slab] = transport.connect(info)

    def _let_go(self, kind: str, slab: str) -> None:
        """Close a slab; one that is not connected is ignored."""
        connected = self._slabs.pop((kind, slab), None)
        if connected is not None:
            connected.close()

    def _reach(self, producer: str, peer: _Peer) -> None:
        """Connect by the best kind that is offered and did not fail lately."""
        now = time.monotonic()
        for kind in self.kinds:
            info = peer.infos.get(kind)
            if info is None or now < peer.failed.get(kind, now):
                continue
            peer.failed.pop(kind, None)
            if kind == peer.connected:
                return
            try:
                self._open(kind, info)
            except TransportUnavailable as error:
                self._stop_using(producer, kind, error)
                continue
            peer.connected = kind
            return

    def _note_failure(self, handle: Handle, error: TransportUnavailable) -> None:
        # A handle of a slab that has been replaced says nothing about its successor.
        peer = self._peers.get(handle.producer)
        if peer is not None and handle.kind in peer.infos and peer.infos[handle.kind].slab == handle.slab:
            self._stop_using(handle.producer, handle.kind, error)

    def _stop_using(self, producer: str, kind: str, error: TransportUnavailable) -> None:
        peer = self._peers.get(producer)
        if peer is None:
            return
        peer.failed[kind] = time.monotonic() + self._retry_seconds
        if kind == peer.connected:
            peer.connected = None
            self._let_go(kind, peer.infos[kind].slab)
        if kind not in peer.reported:
            peer.reported.add(kind)
            _log.warning("hand-off from %s by %s given up: %s", producer, kind, error)

    def _note_route(self, producer: str, kind: str) -> None:
        peer = self._peers.get(producer)
        # One that was let go of while its rows were copied does not come back.
        if peer is not None and peer.route != kind:
            peer.route = kind
            peer.reported.discard(kind)
            _log.info("hand-off from %s goes by %s", producer, kind)

    def _disconnect(self, peer: _Peer) -> None:
        # A slab may still be mapped by a better kind that failed later and came back.
        for kind, info in peer.infos.items():
            self._let_go(kind, info.slab)
