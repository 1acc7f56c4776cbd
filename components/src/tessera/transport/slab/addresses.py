"""What the kinds that read from a slab say about it: its address, and a slot's handle."""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec

from tessera.errors import TransportUnavailable
from tessera.transport.slab.geometry import Geometry
from tessera.transport.slab.slab import Slab
from tessera.transport.slab.slot import Slot
from tessera.wire import Handle, SlabInfo


class Address(Protocol):
    """A kind's own way to reach a slab; the geometry is common to all."""

    @property
    def geometry(self) -> Geometry: ...


A = TypeVar("A", bound=Address)


def slab_info(kind: str, producer: str, slab: Slab, address: Address) -> SlabInfo:
    """What a producer tells its readers about a slab and one way to it."""
    return SlabInfo(
        kind=kind,
        producer=producer,
        slab=slab.name,
        nbytes=slab.geometry.nbytes,
        address=msgspec.msgpack.encode(address),
    )


def slab_handle(kind: str, producer: str, slab: Slab, slot: Slot) -> Handle:
    """A leased slot's handle, for readers that reach the slab by ``kind``."""
    return Handle(
        kind=kind,
        producer=producer,
        slab=slab.name,
        offset=slot.offset,
        shape=slot.shape,
        dtype=slab.geometry.dtype,
        lease=slot.lease,
    )


def decode_address(info: SlabInfo, type_: type[A]) -> A:
    """A peer's address, checked; ``TransportUnavailable`` for one that makes no sense."""
    try:
        address = msgspec.msgpack.decode(info.address, type=type_)
    except msgspec.MsgspecError as error:
        raise TransportUnavailable(
            f"slab {info.slab!r} has a malformed {info.kind} address: {error}"
        ) from error
    if address.geometry.nbytes != info.nbytes:
        raise TransportUnavailable(
            f"slab {info.slab!r} is announced with {info.nbytes} bytes, "
            f"its shape takes {address.geometry.nbytes}"
        )
    return address
