"""Hand-off by NIXL: the reader fetches rows by descriptor, from another host too.

The producer registers its slab and its lease table once. The reader has one registered staging region,
keeps each peer's agent, reads rows into staging and copies them to where they belong. The release is one
more read, of the slot's lease word: what it returns proves the copy, and the notification that follows
it tells the producer that the reader has finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
import torch

from tessera.errors import ConfigError, HandOffError, LeaseExpired
from tessera.transport.kinds.nixl_agent import NixlAgent
from tessera.transport.slab.geometry import (
    Geometry,
    check_origin,
    decode_address,
    slab_handle,
    slab_info,
    unknown_slab,
)
from tessera.transport.slab.rows import check_destination, copy_rows
from tessera.transport.slab.slab import Slab, Slot
from tessera.transport.slab.space import Space
from tessera.wire import Handle, SlabInfo

_PAGE: Final = 64 << 10
_WORDS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlOptions:
    """``staging_bytes`` bounds the rows a reader has under way; ``timeout_seconds`` bounds one read.

    ``gpu_direct`` lets peers read a CUDA slab itself and not its host copy, which is only faster where
    the backend reaches device memory without going through the host. ``interfaces`` are the network
    devices to use, separated by commas (``lo``, ``eth0``, ``mlx5_0:1``), for every agent of this process
    that is made afterwards; empty means all of them. UCX listens on them without authentication.
    """

    staging_bytes: int = 64 << 20
    timeout_seconds: float = 10.0
    gpu_direct: bool = False
    interfaces: str = ""

    def __post_init__(self) -> None:
        if self.staging_bytes < _PAGE or self.timeout_seconds <= 0:
            raise ConfigError(f"staging_bytes must be at least {_PAGE} and timeout_seconds positive")


class NixlAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent's metadata and the virtual addresses of the rows and of the lease table."""

    metadata: bytes
    rows: int
    leases: int
    device: int | None
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class _Peer:
    producer: str
    agent: bytes
    address: NixlAddress


class _Staging:
    """Registered host memory: ``_WORDS`` lease words, then pages for rows."""

    def __init__(self, agent: NixlAgent, nbytes: int) -> None:
        pages = nbytes // _PAGE
        self.rows_space = Space(pages, name="NIXL staging memory")
        self.words_space = Space(_WORDS, name="NIXL staging memory for leases")
        self.words = torch.zeros(_WORDS, dtype=torch.int64)
        self.rows = torch.empty(pages * _PAGE, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        agent.register(
            [(self.words.data_ptr(), 8 * _WORDS, 0), (self.rows.data_ptr(), pages * _PAGE, 0)], device=False
        )


class NixlTransport:
    """Kind ``nixl``; see ``Transport`` for the contract."""

    kind = "nixl"

    def __init__(self, producer: str, slab: Slab | None = None, *, options: NixlOptions) -> None:
        self._producer = producer
        self._slab = slab
        self._options = options
        self._agent = NixlAgent(producer, interfaces=options.interfaces)
        self._staging: _Staging | None = None
        self._peers: dict[str, _Peer] = {}
        self._info: SlabInfo | None = None
        if slab is not None:
            try:
                self._info = self._register(slab)
            except BaseException:
                self._agent.close()
                raise
            slab.add_source(self._finished_leases)

    @property
    def quarantined(self) -> int:
        """Reads given up but not over; the staging memory of each is out of use until it is."""
        return self._agent.quarantined

    @property
    def registrations(self) -> int:
        """Regions of this process's memory that peers or reads may use."""
        return self._agent.registrations

    def describe(self) -> SlabInfo | None:
        return self._info

    def connect(self, info: SlabInfo) -> None:
        if info.slab in self._peers:
            return
        address = decode_address(info, NixlAddress)
        if self._staging is None:
            self._staging = _Staging(self._agent, self._options.staging_bytes)
        self._peers[info.slab] = _Peer(info.producer, self._agent.add_peer(address.metadata), address)

    def disconnect(self, slab: str) -> None:
        peer = self._peers.pop(slab, None)
        if peer is not None:
            self._agent.remove_peer(peer.agent)

    async def publish(self, slot: Slot) -> Handle:
        if self._slab is None:
            raise HandOffError("this process has no slab to publish from")
        if not self._direct(self._slab):
            await self._slab.stage(slot)
        slot.start_lease()
        return slab_handle(self.kind, self._producer, self._slab, slot)

    def check(self, handle: Handle) -> None:
        self._peer(handle)

    async def fetch(self, handle: Handle, into: torch.Tensor) -> None:
        peer, staging = self._peer(handle)
        check_destination(handle, into)
        if await self._lease_word(handle, peer, staging) != handle.lease:
            raise LeaseExpired(f"lease {handle.lease} had ended before its rows were read")
        nbytes = handle.shape[0] * peer.address.geometry.row_bytes
        loan = await staging.rows_space.borrow(-(-nbytes // _PAGE), timeout=self._options.timeout_seconds)
        try:
            first = loan.start * _PAGE
            await self._agent.read(
                peer.agent,
                (staging.rows.data_ptr() + first, nbytes, 0),
                (peer.address.rows + handle.offset, nbytes, peer.address.device or 0),
                remote_device=peer.address.device is not None,
                timeout=self._options.timeout_seconds,
                loan=loan,
            )
            staged = staging.rows[first : first + nbytes].view(into.dtype).view(handle.shape)
            await copy_rows(staged, into)
        finally:
            loan.drop()

    async def release(self, handle: Handle) -> bool:
        peer, staging = self._peer(handle)
        word = await self._lease_word(handle, peer, staging, message=_message(handle))
        return word == handle.lease

    def abandon(self, handle: Handle) -> None:
        try:
            peer, _ = self._peer(handle)
        except HandOffError:
            return
        self._agent.notify(peer.agent, _message(handle))

    def close(self) -> None:
        for slab in list(self._peers):
            self.disconnect(slab)
        self._agent.close()
        self._staging = None
        self._info = None

    def _register(self, slab: Slab) -> SlabInfo:
        rows = slab.rows if self._direct(slab) else slab.host_rows
        leases = slab.memory.lease_tensor()
        geometry = slab.geometry
        device = slab.device.index or 0 if self._direct(slab) else None
        self._agent.register([(leases.data_ptr(), 8 * geometry.units, 0)], device=False)
        self._agent.register([(rows.data_ptr(), geometry.nbytes, device or 0)], device=device is not None)
        address = NixlAddress(
            metadata=self._agent.metadata(),
            rows=rows.data_ptr(),
            leases=leases.data_ptr(),
            device=device,
            geometry=geometry,
        )
        return slab_info(self.kind, self._producer, slab, address)

    def _direct(self, slab: Slab) -> bool:
        return self._options.gpu_direct and slab.device.type == "cuda"

    def _finished_leases(self) -> list[int]:
        """Called by the slab's sweep."""
        return [int.from_bytes(message, "little") for message in self._agent.notifications()]

    def _peer(self, handle: Handle) -> tuple[_Peer, _Staging]:
        peer = self._peers.get(handle.slab)
        if peer is None or self._staging is None:
            raise unknown_slab(handle)
        check_origin(handle, kind=self.kind, producer=peer.producer)
        peer.address.geometry.check(handle)
        return peer, self._staging

    async def _lease_word(self, handle: Handle, peer: _Peer, staging: _Staging, message: bytes = b"") -> int:
        loan = await staging.words_space.borrow(1, timeout=self._options.timeout_seconds)
        try:
            await self._agent.read(
                peer.agent,
                (staging.words.data_ptr() + 8 * loan.start, 8, 0),
                (peer.address.leases + 8 * peer.address.geometry.unit_of(handle), 8, 0),
                message=message,
                timeout=self._options.timeout_seconds,
                loan=loan,
            )
            return int(staging.words[loan.start])
        finally:
            loan.drop()


def _message(handle: Handle) -> bytes:
    return handle.lease.to_bytes(8, "little")
