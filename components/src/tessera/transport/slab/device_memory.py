"""GPU memory that another process can open by a 64-byte handle, and the few CUDA calls that hand-offs need.

The memory comes from the CUDA driver and not from torch. torch's allocator may take a tensor from a segment
that cannot be shared, and its own sharing keeps a reference count for every reader in a named file that
a killed process leaves behind; a slab with many readers that come and go needs neither.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from tessera.errors import HandOffError
from tessera.tasks import Poll
from tessera.transport import cuda_driver
from tessera.transport.cuda_driver import HANDLE_BYTES, LAZY_PEER_ACCESS, MemoryHandle

# Not all of it is typed.
_cuda: Any = torch.cuda


def _call(name: str, device: int, *args: Any) -> None:
    """Call the driver with the device's primary context current; ``HandOffError`` when it refuses."""
    with torch.cuda.device(device):
        # Touching the device through torch makes its primary context this thread's own.
        torch.cuda.synchronize()
        cuda_driver.call(name, *args)


class DeviceMemory:
    """``nbytes`` on one device, ours (``allocate``) or a peer's (``open``).

    The memory goes back when the object and every tensor of it are gone.
    """

    def __init__(self, pointer: int, nbytes: int, device: int, *, release: str) -> None:
        self._pointer = pointer
        self._nbytes = nbytes
        self._device = device
        self._release = release

    @classmethod
    def allocate(cls, nbytes: int, device: int) -> DeviceMemory:
        pointer = ctypes.c_uint64()
        _call("cuMemAlloc_v2", device, ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        return cls(pointer.value, nbytes, device, release="cuMemFree_v2")

    @classmethod
    def open(cls, handle: bytes, nbytes: int, device: int) -> DeviceMemory:
        """A peer's memory; ``HandOffError`` when it is gone, or this process's own."""
        if len(handle) != HANDLE_BYTES:
            raise HandOffError(f"a CUDA memory handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        pointer = ctypes.c_uint64()
        shared = MemoryHandle.from_buffer_copy(handle)
        _call("cuIpcOpenMemHandle_v2", device, ctypes.byref(pointer), shared, ctypes.c_uint(LAZY_PEER_ACCESS))
        return cls(pointer.value, nbytes, device, release="cuIpcCloseMemHandle")

    def handle(self) -> bytes:
        """What a peer opens the memory by."""
        shared = MemoryHandle()
        _call("cuIpcGetMemHandle", self._device, ctypes.byref(shared), ctypes.c_uint64(self._pointer))
        return bytes(shared)

    def tensor(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """The memory as a tensor of ``shape``, which keeps it alive."""
        device = torch.device("cuda", self._device)
        raw: torch.Tensor = torch.as_tensor(self, device=device)
        rows = raw.view(dtype).view(shape)
        # A copy would look like the slab and never be it.
        assert rows.data_ptr() == self._pointer
        return rows

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self._nbytes,), "typestr": "|u1", "data": (self._pointer, False), "version": 2}

    def __del__(self) -> None:
        try:
            _call(self._release, self._device, ctypes.c_uint64(self._pointer))
        except Exception:
            # The driver ends before Python does when the interpreter shuts down, and frees all.
            return


async def finished(device: torch.device) -> None:
    """Wait, without blocking the event loop, for what the current stream of ``device`` was given so far."""
    event = _cuda.Event()
    with torch.cuda.device(device):
        event.record(torch.cuda.current_stream())
    poll = Poll()
    while not event.query():
        await poll.pause()


def pin(rows: torch.Tensor) -> None:
    """Page-lock host memory in place, so that copies between it and a device run beside the host."""
    status = int(_cuda.cudart().cudaHostRegister(rows.data_ptr(), rows.numel() * rows.element_size(), 0))
    if status != 0:
        raise HandOffError(f"cannot page-lock the host copy of the slab: CUDA error {status}")


def unpin(rows: torch.Tensor) -> None:
    """Undo ``pin``."""
    _cuda.cudart().cudaHostUnregister(rows.data_ptr())


def index_of(device: torch.device) -> int:
    """The device's index; plain ``cuda`` means the current one."""
    return device.index if device.index is not None else torch.cuda.current_device()
