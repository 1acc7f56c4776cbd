"""Hand-off on one GPU: the reader opens the producer's slab once and copies device to device."""

from __future__ import annotations

import msgspec
import torch

from tessera.dtypes import FLOATS
from tessera.errors import HandOffError, TransportUnavailable
from tessera.transport.base import PeerSlab, Transport
from tessera.transport.host import device_ids, host_id
from tessera.transport.kinds.shm import MappedSlab
from tessera.transport.slab.device_memory import DeviceMemory, finished, index_of
from tessera.transport.slab.geometry import Geometry, decode_address, slab_info
from tessera.transport.slab.memory import HostAddress, HostMemory
from tessera.transport.slab.slab import Slab, Slot
from tessera.wire import Handle, ReaderInfo, SlabInfo


class CudaIpcAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPU's UUID, the handle of the slab's memory there, and where its lease words are."""

    device: str
    handle: bytes
    memory: HostAddress
    geometry: Geometry


class CudaIpcTransport(Transport):
    """Kind ``cuda_ipc``."""

    kind = "cuda_ipc"

    def __init__(self, producer: str, slab: Slab | None = None) -> None:
        super().__init__(producer, slab)
        if slab is not None:
            self.info = slab_info(self.kind, producer, slab.name, _share(slab))

    def reaches(self, reader: ReaderInfo) -> bool:
        assert self._slab is not None
        return reader.host == host_id() and device_ids()[index_of(self._slab.device)] in reader.devices

    async def publish(self, slot: Slot) -> Handle:
        return slot.slab.lease(slot, self.kind, self._producer)

    def connect(self, info: SlabInfo) -> PeerSlab:
        address = decode_address(info, CudaIpcAddress)
        if address.device not in device_ids():
            raise TransportUnavailable(f"slab {info.slab} lies on a GPU that this process does not see")
        memory = HostMemory.attach(address.memory, info.slab, address.geometry)
        try:
            rows = _open(address, device_ids().index(address.device))
        except BaseException:
            memory.close()
            raise
        return MappedSlab(info, memory, rows, _copy)


async def _copy(source: torch.Tensor, into: torch.Tensor) -> None:
    with torch.cuda.device(source.device):
        into.copy_(source, non_blocking=into.device.type == "cuda")
    # The lease word is only worth reading once the copy has really happened.
    await finished(source.device)
    if into.device.type == "cuda" and into.device != source.device:
        await finished(into.device)


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
    return memory.tensor((geometry.capacity_rows, geometry.row_width), FLOATS[geometry.dtype].torch)
