"""Memory of a card that a client allocated, opened by the handle that CUDA gave the client for it."""

from __future__ import annotations

import ctypes

import numpy as np

from tessera.errors import HandOffError, InvalidInput
from tessera.transport import cuda_driver
from tessera.transport.cuda_driver import HANDLE_BYTES, LAZY_PEER_ACCESS, MemoryHandle
from tessera_kserve.shared_memory.memory import Lost


def have_driver() -> bool:
    """Whether there is one; not whether it has a card."""
    try:
        cuda_driver.load()
    except HandOffError:
        return False
    return True


class CudaMemory:
    """Implements ``Memory``: ``pointer`` is where this process has it."""

    def __init__(self, device_id: int, pointer: int, handle: bytes) -> None:
        self.described: dict[str, str | int] = {"device_id": device_id}
        self._device_id = device_id
        self._pointer = pointer
        self.place = f"GPU {device_id}"
        self.identity: object = handle

    def place_bytes(self) -> int:
        return cuda_driver.total_bytes(self._device_id)

    @classmethod
    def open(cls, handle: bytes, device_id: int, byte_size: int, *, region: str) -> CudaMemory:
        """Raises ``InvalidInput`` naming what is wrong, also where there are no cards.

        ``region`` is for messages. How large the memory is the driver says, whatever the client says.
        """
        if len(handle) != HANDLE_BYTES:
            raise InvalidInput.at(
                "raw_handle", f"that of the region {region!r} has {len(handle)} bytes, not {HANDLE_BYTES}"
            )
        try:
            count = cuda_driver.devices()
        except HandOffError as error:
            raise InvalidInput.at(
                "device_id", f"the region {region!r} cannot be in CUDA memory: {error}"
            ) from None
        if not 0 <= device_id < count:
            raise InvalidInput.at(
                "device_id", f"the region {region!r} is on none of the {count} GPUs here, from 0 on"
            )
        pointer = ctypes.c_uint64()
        shared = MemoryHandle.from_buffer_copy(handle)
        try:
            with cuda_driver.current(device_id):
                cuda_driver.call(
                    "cuIpcOpenMemHandle_v2", ctypes.byref(pointer), shared, ctypes.c_uint(LAZY_PEER_ACCESS)
                )
        except HandOffError as error:
            raise InvalidInput.at(
                "raw_handle", f"that of the region {region!r} cannot be opened on GPU {device_id}: {error}"
            ) from None
        memory = cls(device_id, pointer.value, handle)
        there = memory._size()
        if byte_size > there:
            # Closed by this thread, and not by the one that handles the error.
            del memory
            raise InvalidInput.at(
                "byte_size", f"the region {region!r} is to have {byte_size} bytes, and its memory has {there}"
            )
        return memory

    def _size(self) -> int:
        """Bytes from ``pointer`` to the end of the allocation; none where the driver does not say."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        asked = ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(self._pointer)
        try:
            self._call("cuMemGetAddressRange_v2", *asked)
        except Lost:
            # An error on its way would keep the memory open.
            return 0
        return base.value + size.value - self._pointer

    def read(self, offset: int, size: int) -> memoryview:
        data = np.empty(size, np.uint8)
        place = ctypes.c_void_p(data.ctypes.data)
        self._call("cuMemcpyDtoH_v2", place, ctypes.c_uint64(self._pointer + offset), ctypes.c_size_t(size))
        return data.data

    def write(self, offset: int, data: bytes) -> None:
        size = ctypes.c_size_t(len(data))
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(self._pointer + offset), ctypes.c_char_p(data), size)
        # Until now the bytes may only have left the host's pages.
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *args: object) -> None:
        try:
            with cuda_driver.current(self._device_id):
                cuda_driver.call(name, *args)
        except HandOffError as error:
            raise Lost(f"is out of reach: {error}") from None

    def __del__(self) -> None:
        try:
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(self._pointer))
        except Lost:
            # A context that is broken, or ends with the process, has let go of it.
            return
