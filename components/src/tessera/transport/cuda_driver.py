"""The CUDA driver's calls on memory that one process opens by another's 64-byte handle, by ctypes alone.

Both who has torch and who has none use it: workers for their slabs, frontends for regions of their clients.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from tessera.errors import HandOffError, TransportUnavailable

HANDLE_BYTES: Final = 64
LAZY_PEER_ACCESS: Final = 1


class MemoryHandle(ctypes.Structure):
    """What the driver has as ``CUipcMemHandle``, and CUDA's runtime as ``cudaIpcMemHandle_t``."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


@functools.cache
def load() -> ctypes.CDLL:
    """The driver's library; ``TransportUnavailable`` where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise TransportUnavailable("this machine has no CUDA driver (libcuda.so.1)") from None


def call(name: str, *args: Any) -> None:
    """Raises ``HandOffError`` when the driver refuses. The interpreter's lock is free meanwhile."""
    status = getattr(load(), name)(*args)
    if status != 0:
        raise HandOffError(f"{name} failed with CUDA driver error {status}")


def devices() -> int:
    """How many this process sees; for one that has no other library that begins with the driver."""
    call("cuInit", ctypes.c_uint(0))
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    return count.value


def total_bytes(device: int) -> int:
    """Return the size of a device's memory, after ``devices``."""
    number, size = ctypes.c_int(), ctypes.c_size_t()
    call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
    call("cuDeviceTotalMem_v2", ctypes.byref(size), number)
    return size.value


@functools.cache
def _context(device: int) -> int:
    """The device's primary context, which this process keeps until it ends: making one takes a moment."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    assert context.value is not None
    return context.value


@contextmanager
def current(device: int) -> Iterator[None]:
    """Make the device this thread's own for a few calls, without torch."""
    call("cuCtxPushCurrent_v2", ctypes.c_void_p(_context(device)))
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
