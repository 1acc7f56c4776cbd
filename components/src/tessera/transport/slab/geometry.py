"""The shape of a slab, its address, and whether a handle fits it."""

from __future__ import annotations

from functools import cached_property
from typing import Final, Protocol, TypeVar

import msgspec

from tessera.dtypes import FLOATS
from tessera.errors import HandOffError, TransportUnavailable
from tessera.wire import Handle, SlabInfo

MAX_LEASE: Final = 2**63 - 1


class Geometry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """``capacity_rows`` rows of ``row_width`` elements; slots begin at multiples of ``block_rows`` rows.

    Sizes that every hand-off needs are computed once.
    """

    capacity_rows: int
    block_rows: int
    row_width: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in FLOATS:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        if self.row_width <= 0 or self.block_rows <= 0 or self.capacity_rows <= 0:
            raise ValueError("capacity_rows, block_rows and row_width must be positive")
        if self.capacity_rows % self.block_rows:
            raise ValueError(
                f"capacity_rows={self.capacity_rows} is no multiple of block_rows={self.block_rows}"
            )

    @property
    def blocks(self) -> int:
        return self.capacity_rows // self.block_rows

    @cached_property
    def row_bytes(self) -> int:
        return self.row_width * FLOATS[self.dtype].itemsize

    @cached_property
    def block_bytes(self) -> int:
        return self.block_rows * self.row_bytes

    @cached_property
    def nbytes(self) -> int:
        return self.capacity_rows * self.row_bytes

    def check(self, handle: Handle, slab: SlabInfo | None) -> int:
        """Return the index of a handle's first block, the one whose lease word speaks for the slot.

        Raises ``HandOffError`` unless the handle names a slot that this slab can have, and
        ``TransportUnavailable`` without a slab: it has been let go.
        """
        if slab is None:
            raise unknown_slab(handle)
        rows = check_shape(handle)
        if (handle.kind, handle.producer) != (slab.kind, slab.producer):
            origin, here = f"{handle.kind} of {handle.producer!r}", f"{slab.kind} of {slab.producer!r}"
            raise HandOffError(f"the handle names a slab by {origin}, this one is by {here}")
        if handle.dtype != self.dtype:
            raise HandOffError(f"the handle's dtype is {handle.dtype}, its slab's is {self.dtype}")
        if handle.shape[1] != self.row_width:
            raise HandOffError(
                f"the handle's rows have {handle.shape[1]} elements, its slab's {self.row_width}"
            )
        if handle.offset < 0 or handle.offset % self.block_bytes:
            raise HandOffError(f"offset {handle.offset} is not where a slot of this slab begins")
        if handle.offset + rows * self.row_bytes > self.nbytes:
            raise HandOffError(f"{rows} rows at offset {handle.offset} end beyond the slab")
        if handle.data:
            raise HandOffError(f"a handle of kind {handle.kind} carries {len(handle.data)} bytes of data")
        return handle.offset // self.block_bytes


def check_shape(handle: Handle) -> int:
    """Check what every kind's handle must satisfy; the number of rows."""
    if handle.dtype not in FLOATS:
        raise HandOffError(f"the handle's dtype {handle.dtype!r} is not one that is handed off")
    if len(handle.shape) != 2 or min(handle.shape) <= 0:
        raise HandOffError(f"the handle's shape {handle.shape} is not [rows, row_width]")
    if not 0 < handle.lease <= MAX_LEASE:
        raise HandOffError(f"{handle.lease} is no lease")
    return handle.shape[0]


def unknown_slab(handle: Handle) -> TransportUnavailable:
    """The error for a handle of a slab that this process has not connected, or has let go."""
    return TransportUnavailable(
        f"slab {handle.slab!r} of {handle.producer!r} is not connected by {handle.kind}"
    )


class Address(Protocol):
    """A kind's own way to reach a slab; the geometry is common to all."""

    @property
    def geometry(self) -> Geometry: ...


A = TypeVar("A", bound=Address)


def slab_info(kind: str, producer: str, slab: str, address: Address) -> SlabInfo:
    """What a producer tells its readers about the slab of this name and one way to it."""
    return SlabInfo(
        kind=kind,
        producer=producer,
        slab=slab,
        nbytes=address.geometry.nbytes,
        address=msgspec.msgpack.encode(address),
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
