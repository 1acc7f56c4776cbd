from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import msgspec
import pytest
import torch

from tessera.errors import TransportUnavailable
from tessera.transport.slab.geometry import Geometry
from tessera.transport.slab.memory import HostAddress, HostMemory

GEOMETRY = Geometry(capacity_rows=2048, block_rows=2, row_width=4, dtype="bfloat16")


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    made = HostMemory.create(GEOMETRY, rows=True)
    yield made
    made.close()


def test_both_sides_see_the_same_words_and_rows(memory: HostMemory) -> None:
    reader = HostMemory.attach(memory.address(), memory.slab, GEOMETRY)
    assert memory.rows is not None and reader.rows is not None
    memory.rows[2047] = 7
    memory.lease[1023] = 2**62
    assert reader.rows[2047].tolist() == [7, 7, 7, 7]
    assert reader.holds(1023, 2**62)
    reader.acknowledge(1023, 2**62)
    assert memory.ack[1023] == 2**62
    # Neighbouring areas are untouched.
    assert not memory.rows[:2047].any()
    assert sum(memory.lease) == sum(memory.ack) == 2**62
    reader.close()


def test_a_reader_cannot_write_leases(memory: HostMemory) -> None:
    reader = HostMemory.attach(memory.address(), memory.slab, GEOMETRY)
    with pytest.raises(TypeError, match="read-only"):
        reader.lease[0] = 1
    reader.close()


def test_the_file_cannot_change_its_size(memory: HostMemory) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(memory.address().fd, 0)


def test_a_tensor_outlives_its_mapping(memory: HostMemory) -> None:
    reader = HostMemory.attach(memory.address(), memory.slab, GEOMETRY)
    rows = reader.rows
    reader.close()
    reader.close()
    assert rows is not None and not rows.any()


def test_what_is_not_the_announced_slab_is_unavailable(memory: HostMemory) -> None:
    address = memory.address()
    other = HostMemory.create(GEOMETRY, rows=True)
    with pytest.raises(TransportUnavailable, match="is not slab"):
        HostMemory.attach(address, other.slab, GEOMETRY)
    with pytest.raises(TransportUnavailable, match="announced size"):
        HostMemory.attach(address, memory.slab, msgspec.structs.replace(GEOMETRY, capacity_rows=1 << 20))
    with pytest.raises(TransportUnavailable, match="cannot open"):
        HostMemory.attach(HostAddress(pid=2**22 + 1, fd=3, rows=True), memory.slab, GEOMETRY)
    with pytest.raises(TransportUnavailable):
        HostMemory.attach(address, "not hexadecimal", GEOMETRY)
    other.close()


def test_a_file_that_could_shrink_is_refused(memory: HostMemory) -> None:
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, os.fstat(memory.address().fd).st_size)
    os.pwrite(fd, os.pread(memory.address().fd, 64, 0), 0)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == 0
    with pytest.raises(TransportUnavailable, match="shrink"):
        HostMemory.attach(HostAddress(pid=os.getpid(), fd=fd, rows=True), memory.slab, GEOMETRY)
    os.close(fd)


def test_nothing_stays_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        memory = HostMemory.create(GEOMETRY, rows=True)
        reader = HostMemory.attach(memory.address(), memory.slab, GEOMETRY)
        reader.close()
        memory.close()
        del memory, reader
    assert len(os.listdir("/proc/self/fd")) == before


def test_tables_alone_take_no_rows() -> None:
    memory = HostMemory.create(GEOMETRY, rows=False)
    assert memory.rows is None
    assert isinstance(memory.lease_tensor(), torch.Tensor)
    assert memory.lease_tensor().shape == (1024,)
    memory.close()
