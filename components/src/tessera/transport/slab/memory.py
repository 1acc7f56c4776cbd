"""Host memory that peers on the same kernel can map: lease tables, and the rows of a host slab.

One anonymous file holds, each from a page boundary on::

    header   magic, slab id
    lease    int64 [blocks]   written by the producer alone: the slot's lease, 0 when there is none
    ack      int64 [blocks]   written by readers alone: the lease they have finished with
    rows     [capacity_rows, row_width], or nothing when the rows live elsewhere

The file has no name, so nothing is left behind when a process is killed. A slot's words stand at its
first block; the words of its other blocks are not used.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import numpy.typing as npt

from tessera.dtypes import FLOATS
from tessera.errors import TransportUnavailable
from tessera.transport.slab.geometry import Geometry

if TYPE_CHECKING:
    import torch

_MAGIC: Final = b"tessera-slab-v1\0"
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_order = threading.Lock()


def fence() -> None:
    """Keep memory accesses before this call before those after it, for other processes too.

    On x86 plain loads and stores are ordered enough; on ARM they are not. A released lock followed by
    an acquired one is a full barrier on both, and all that Python offers.
    """
    with _order:
        pass
    with _order:
        pass


class HostAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a peer finds the file: a descriptor of a live process."""

    pid: int
    fd: int
    rows: bool


class ShmAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the ``shm`` kind reaches a slab in host memory."""

    memory: HostAddress
    geometry: Geometry


class FileOffsets:
    """Where each part of the file begins, in bytes, and how long the file is."""

    def __init__(self, geometry: Geometry, *, rows: bool) -> None:
        table = _pages(8 * geometry.blocks)
        self.lease = mmap.PAGESIZE
        self.ack = self.lease + table
        self.rows = self.ack + table
        self.nbytes = self.rows + (_pages(geometry.nbytes) if rows else 0)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class HostMemory:
    """A mapping of the file, by its producer (``create``) or by a reader (``attach``).

    ``lease`` and ``ack`` are memory views of int64 ``[blocks]``; ``rows`` is ``[capacity_rows, row_width]``
    or None. A tensor taken from ``rows`` keeps the mapping alive, so that ``close`` never pulls memory
    away from under it; the descriptor and the pages go with the last such tensor.
    """

    def __init__(self, fd: int, slab: str, geometry: Geometry, *, rows: bool, writable: bool) -> None:
        offsets = FileOffsets(geometry, rows=rows)
        self.slab = slab
        self.geometry = geometry
        self.has_rows = rows
        self._fd = fd if writable else -1
        self._closed = False
        # A reader can change nothing but the acknowledgements.
        if writable:
            self._map = mmap.mmap(fd, offsets.nbytes)
            self._ack_map = self._map
            ack_at = offsets.ack
        else:
            self._map = mmap.mmap(fd, offsets.nbytes, prot=mmap.PROT_READ)
            self._ack_map = mmap.mmap(fd, offsets.rows - offsets.ack, offset=offsets.ack)
            ack_at = 0
        words = 8 * geometry.blocks
        self.lease = memoryview(self._map)[offsets.lease : offsets.lease + words].cast("q")
        self.ack = memoryview(self._ack_map)[ack_at : ack_at + words].cast("q")
        self._rows_at = offsets.rows
        self._tensor: torch.Tensor | None = None

    @classmethod
    def create(cls, geometry: Geometry, *, rows: bool) -> HostMemory:
        """New zeroed memory; pages are committed when they are first touched."""
        offsets = FileOffsets(geometry, rows=rows)
        identity = secrets.token_bytes(16)
        fd = os.memfd_create("tessera-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, offsets.nbytes)
            os.pwrite(fd, _MAGIC + identity, 0)
            # A file that cannot shrink cannot turn a reader's access into a bus error.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, identity.hex(), geometry, rows=rows, writable=True)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, address: HostAddress, slab: str, geometry: Geometry) -> HostMemory:
        """Map a live peer's memory; ``TransportUnavailable`` when that is not what the address leads to."""
        with cls._opened(address, slab, geometry) as fd:
            # The mappings hold the file.
            return cls(fd, slab, geometry, rows=address.rows, writable=False)

    @classmethod
    def fill(cls, address: HostAddress, slab: str, geometry: Geometry, rows: memoryview) -> None:
        """Write rows to a live peer's memory, from its first row on; raises as ``attach``.

        Not through a mapping, which would fault at every page: to write 13 MB takes 4 ms of a processor,
        without the interpreter's lock.
        """
        if not address.rows or len(rows) > geometry.nbytes:
            raise TransportUnavailable(f"{len(rows)} bytes of rows do not fit a peer's memory")
        with cls._opened(address, slab, geometry) as fd:
            at = FileOffsets(geometry, rows=True).rows
            while len(rows):
                written = os.pwrite(fd, rows, at)
                rows, at = rows[written:], at + written

    @staticmethod
    @contextmanager
    def _opened(address: HostAddress, slab: str, geometry: Geometry) -> Iterator[int]:
        """Open a live peer's file; every error becomes ``TransportUnavailable``."""
        path = f"/proc/{address.pid}/fd/{address.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransportUnavailable(f"cannot open a peer's slab: {error}") from error
        try:
            # The process id may belong to somebody else by now: believe the file, not its path.
            if os.fstat(fd).st_size != FileOffsets(geometry, rows=address.rows).nbytes:
                raise TransportUnavailable("a peer's slab does not have the announced size")
            if os.pread(fd, 32, 0) != _MAGIC + bytes.fromhex(slab):
                raise TransportUnavailable(f"a peer's memory is not slab {slab}")
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise TransportUnavailable("a peer's slab could shrink under its reader")
            yield fd
        except (OSError, ValueError) as error:
            raise TransportUnavailable(f"cannot map a peer's slab: {error}") from error
        finally:
            os.close(fd)

    def address(self) -> HostAddress:
        return HostAddress(pid=os.getpid(), fd=self._fd, rows=self.has_rows)

    def lease_tensor(self) -> torch.Tensor:
        """The producer's lease table as int64 ``[blocks]``; NIXL registers its address."""
        import torch

        return torch.frombuffer(
            self._map, dtype=torch.int64, count=self.geometry.blocks, offset=mmap.PAGESIZE
        )

    def holds(self, block: int, lease: int) -> bool:
        """Whether the lease is still in force, as of everything read before this call."""
        fence()
        return self.lease[block] == lease

    def acknowledge(self, block: int, lease: int) -> None:
        """Tell the producer that this reader has finished.

        A late word does no harm: leases are never reused, so it cannot equal a newer one.
        """
        fence()
        self.ack[block] = lease

    def close(self) -> None:
        """Let go of the memory; it is unmapped once no tensor of it is left."""
        if self._closed:
            return
        self._closed = True
        if self._fd >= 0:
            os.close(self._fd)
        self.lease.release()
        self.ack.release()
        self._tensor = None
        del self._map, self._ack_map

    @property
    def rows(self) -> torch.Tensor | None:
        """Made when it is first asked for: a frontend has no torch and writes bytes."""
        if self._tensor is None and self.has_rows and not self._closed:
            self._tensor = self._make_tensor()
        return self._tensor

    def array(self) -> npt.NDArray[np.uint8]:
        """Return the bytes of the rows, read-only; they keep the mapping alive, as a tensor does."""
        rows = np.frombuffer(self._map, np.uint8, self.geometry.nbytes, self._rows_at)
        rows.flags.writeable = False
        return rows

    def write(self, rows: bytes) -> None:
        """Fill the rows from the first one on with their raw values; for the producer."""
        self._map[self._rows_at : self._rows_at + len(rows)] = rows

    def _make_tensor(self) -> torch.Tensor:
        import torch

        with warnings.catch_warnings():
            # Readers map the rows read-only and never write to them; torch has no such tensors.
            warnings.simplefilter("ignore", UserWarning)
            flat = torch.frombuffer(
                self._map,
                dtype=FLOATS[self.geometry.dtype].torch,
                count=self.geometry.capacity_rows * self.geometry.row_width,
                offset=self._rows_at,
            )
        return flat.view(self.geometry.capacity_rows, self.geometry.row_width)
