"""Hand-off on one GPU: the reader opens the producer's slab once and copies device to device."""

from __future__ import annotations

import msgspec
import torch

from tessera.dtypes import FLOATS
from tessera.errors import HandOffError, LeaseExpired, TransportUnavailable
from tessera.transport.cuda import finished, index_of
from tessera.transport.host import device_ids
from tessera.transport.slab.device_memory import DeviceMemory
from tessera.transport.slab.geometry import (
    Geometry,
    check_origin,
    decode_address,
    slab_handle,
    slab_info,
    unknown_slab,
)
from tessera.transport.slab.memory import HostAddress, HostMemory
from tessera.transport.slab.rows import check_destination
from tessera.transport.slab.slab import Slab, Slot
from tessera.wire import Handle, SlabInfo


class CudaIpcAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPU's UUID, the handle of the slab's memory there, and where its lease words are."""

    device: str
    handle: bytes
    memory: HostAddress
    geometry: Geometry


class _Peer:
    def __init__(self, producer: str, memory: HostMemory, rows: torch.Tensor) -> None:
        self.producer = producer
        self.memory = memory
        self.rows = rows


class CudaIpcTransport:
    """Kind ``cuda_ipc``; see ``Transport`` for the contract."""

    kind = "cuda_ipc"

    def __init__(self, producer: str, slab: Slab | None = None) -> None:
        self._producer = producer
        self._slab = slab
        self._info: SlabInfo | None = None
        self._peers: dict[str, _Peer] = {}

    def describe(self) -> SlabInfo | None:
        if self._slab is not None and self._info is None:
            self._info = slab_info(self.kind, self._producer, self._slab, _share(self._slab))
        return self._info

    def connect(self, info: SlabInfo) -> None:
        if info.slab in self._peers:
            return
        address = decode_address(info, CudaIpcAddress)
        if address.device not in device_ids():
            raise TransportUnavailable(f"slab {info.slab} lies on a GPU that this process does not see")
        memory = HostMemory.attach(address.memory, info.slab, address.geometry)
        try:
            rows = _open(address, device_ids().index(address.device))
        except BaseException:
            memory.close()
            raise
        self._peers[info.slab] = _Peer(info.producer, memory, rows)

    def disconnect(self, slab: str) -> None:
        peer = self._peers.pop(slab, None)
        if peer is not None:
            peer.memory.close()

    async def publish(self, slot: Slot) -> Handle:
        if self._slab is None:
            raise HandOffError("this process has no slab to publish from")
        slot.start_lease()
        return slab_handle(self.kind, self._producer, self._slab, slot)

    def check(self, handle: Handle) -> None:
        self._peer(handle)

    async def fetch(self, handle: Handle, into: torch.Tensor) -> None:
        peer = self._peer(handle)
        check_destination(handle, into)
        geometry = peer.memory.geometry
        unit = geometry.unit_of(handle)
        if not peer.memory.holds(unit, handle.lease):
            raise LeaseExpired(f"lease {handle.lease} had ended before its rows were copied")
        first = unit * geometry.unit_rows
        with torch.cuda.device(peer.rows.device):
            into.copy_(peer.rows[first : first + handle.shape[0]], non_blocking=into.device.type == "cuda")
        # The lease word is only worth reading once the copy has really happened.
        await finished(peer.rows.device)
        if into.device.type == "cuda" and into.device != peer.rows.device:
            await finished(into.device)

    async def release(self, handle: Handle) -> bool:
        peer = self._peer(handle)
        unit = peer.memory.geometry.unit_of(handle)
        good = peer.memory.holds(unit, handle.lease)
        peer.memory.acknowledge(unit, handle.lease)
        return good

    def abandon(self, handle: Handle) -> None:
        try:
            peer = self._peer(handle)
        except HandOffError:
            return
        peer.memory.acknowledge(peer.memory.geometry.unit_of(handle), handle.lease)

    def close(self) -> None:
        for slab in list(self._peers):
            self.disconnect(slab)

    def _peer(self, handle: Handle) -> _Peer:
        peer = self._peers.get(handle.slab)
        if peer is None:
            raise unknown_slab(handle)
        check_origin(handle, kind=self.kind, producer=peer.producer)
        peer.memory.geometry.check(handle)
        return peer


def _share(slab: Slab) -> CudaIpcAddress:
    if slab.device_memory is None:
        raise HandOffError("only a slab on a CUDA device can be shared by cuda_ipc")
    return CudaIpcAddress(
        device=device_ids()[index_of(slab.device)],
        handle=slab.device_memory.handle(),
        memory=slab.memory.address(),
        geometry=slab.geometry,
    )


def _open(address: CudaIpcAddress, device: int) -> torch.Tensor:
    geometry = address.geometry
    try:
        memory = DeviceMemory.open(address.handle, geometry.nbytes, device)
    except HandOffError as error:
        raise TransportUnavailable(f"cannot open a peer's GPU memory: {error}") from error
    return memory.tensor((geometry.capacity_rows, geometry.hidden), FLOATS[geometry.dtype].torch)
