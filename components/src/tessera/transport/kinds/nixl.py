"""Hand-off by NIXL: the reader fetches rows by descriptor, from another host too.

The producer registers its slab and its lease table once. The reader has one registered staging region,
keeps each peer's agent, reads rows into staging and copies them to where they belong. The release is one
more read, of the slot's lease word: what it returns proves the copy, and the notification that follows
it tells the producer that the reader has finished.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import torch

from tessera.errors import LeaseExpired
from tessera.transport.base import PeerSlab, Transport
from tessera.transport.kinds.nixl_agent import NixlAgent
from tessera.transport.settings import TransportSettings
from tessera.transport.slab.geometry import Geometry, decode_address, slab_info
from tessera.transport.slab.slab import Slab, Slot, copy_rows, destination
from tessera.transport.slab.space import Space
from tessera.wire import Handle, SlabInfo

if TYPE_CHECKING:
    from tessera.transport.base import Destination

_PAGE: Final = 64 << 10
_WORDS: Final = 1024
# Where nobody has chosen.
_STAGING_MB: Final = 64
# What one read may take.
READ_SECONDS = 10.0


class NixlAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent's metadata and the virtual addresses of the rows and of the lease table."""

    metadata: bytes
    rows: int
    leases: int
    geometry: Geometry


class _Staging:
    """Registered host memory: ``_WORDS`` lease words, then pages for rows."""

    def __init__(self, agent: NixlAgent, nbytes: int) -> None:
        pages = nbytes // _PAGE
        self.rows_space = Space(pages, name="NIXL staging memory")
        self.words_space = Space(_WORDS, name="NIXL staging memory for leases")
        self.words = torch.zeros(_WORDS, dtype=torch.int64)
        self.rows = torch.empty(pages * _PAGE, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        agent.register([(self.words.data_ptr(), 8 * _WORDS, 0), (self.rows.data_ptr(), pages * _PAGE, 0)])


class NixlTransport(Transport):
    """Kind ``nixl``.

    UCX listens on the interfaces of the settings (``lo``, ``eth0``, ``mlx5_0:1``) without authentication.
    They hold for every agent of this process that is made afterwards.
    """

    kind = "nixl"

    def __init__(self, producer: str, slab: Slab | None = None, *, settings: TransportSettings) -> None:
        super().__init__(producer, slab)
        self._staging_bytes = (settings.staging_mb or _STAGING_MB) << 20
        self._agent = NixlAgent(producer, interfaces=settings.nixl_interfaces)
        self._staging: _Staging | None = None
        self._published = False
        if slab is not None:
            try:
                self.info = self._register(slab)
            except BaseException:
                self._agent.close()
                raise

    @property
    def registrations(self) -> int:
        return self._agent.registrations

    async def publish(self, slot: Slot) -> Handle:
        await slot.slab.stage(slot)
        if not self._published:
            # The agent is asked for its peers' messages from here on: before, no reader can have any.
            slot.slab.add_source(self._finished_leases)
            self._published = True
        return slot.slab.lease(slot, self.kind, self._producer)

    def connect(self, info: SlabInfo) -> PeerSlab:
        address = decode_address(info, NixlAddress)
        if self._staging is None:
            self._staging = _Staging(self._agent, self._staging_bytes)
        peer = self._agent.add_peer(address.metadata)
        return NixlSlab(self._agent, peer, info, address, self._staging)

    def close(self) -> None:
        self._agent.close()
        self._staging = None
        self.info = None

    def _register(self, slab: Slab) -> SlabInfo:
        rows, leases, geometry = slab.host_rows, slab.memory.lease_tensor(), slab.geometry
        self._agent.register([(leases.data_ptr(), 8 * geometry.blocks, 0)])
        self._agent.register([(rows.data_ptr(), geometry.nbytes, 0)])
        address = NixlAddress(
            metadata=self._agent.metadata(),
            rows=rows.data_ptr(),
            leases=leases.data_ptr(),
            geometry=geometry,
        )
        return slab_info(self.kind, self._producer, slab.name, address)

    def _finished_leases(self) -> list[int]:
        """Called by the slab's sweep."""
        return [int.from_bytes(message, "little") for message in self._agent.notifications()]


class NixlSlab(PeerSlab):
    """Reads a registered slab by way of this process's staging memory."""

    def __init__(
        self, agent: NixlAgent, peer: bytes, info: SlabInfo, address: NixlAddress, staging: _Staging
    ) -> None:
        super().__init__(info, address.geometry)
        self._agent = agent
        self._peer = peer
        self._address = address
        self._staging = staging

    async def fetch(self, handle: Handle, into: Destination) -> torch.Tensor:
        block = self._geometry.check(handle, self._info)
        rows = destination(handle, into)
        if await self._lease_word(block) != handle.lease:
            raise LeaseExpired(f"lease {handle.lease} had ended before its rows were read")
        staging, address = self._staging, self._address
        nbytes = handle.shape[0] * self._geometry.row_bytes
        shared = await staging.rows_space.share(-(-nbytes // _PAGE), timeout=READ_SECONDS)
        try:
            first = shared.start * _PAGE
            await self._agent.read(
                self._peer,
                (staging.rows.data_ptr() + first, nbytes, 0),
                (address.rows + handle.offset, nbytes, 0),
                timeout=READ_SECONDS,
                memory=shared,
            )
            staged = staging.rows[first : first + nbytes].view(rows.dtype).view(handle.shape)
            await copy_rows(staged, rows)
        finally:
            shared.drop()
        return rows

    async def release(self, handle: Handle) -> bool:
        block = self._geometry.check(handle, self._info)
        return await self._lease_word(block, message=_message(handle)) == handle.lease

    def _give_back(self, block: int, handle: Handle) -> None:
        self._agent.notify(self._peer, _message(handle))

    def close(self) -> None:
        if self._info is not None:
            super().close()
            self._agent.remove_peer(self._peer)

    async def _lease_word(self, block: int, message: bytes = b"") -> int:
        staging, address = self._staging, self._address
        shared = await staging.words_space.share(1, timeout=READ_SECONDS)
        try:
            await self._agent.read(
                self._peer,
                (staging.words.data_ptr() + 8 * shared.start, 8, 0),
                (address.leases + 8 * block, 8, 0),
                message=message,
                timeout=READ_SECONDS,
                memory=shared,
            )
            return int(staging.words[shared.start])
        finally:
            shared.drop()


def _message(handle: Handle) -> bytes:
    return handle.lease.to_bytes(8, "little")
