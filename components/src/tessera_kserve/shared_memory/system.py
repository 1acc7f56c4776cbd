"""Files of ``/dev/shm``, read and written by offset.

They are never mapped: a mapping ends the process that touches it when the client shortens the file.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Final

from tessera.errors import InvalidInput
from tessera.frontend.api.values import clip
from tessera_kserve.shared_memory.memory import Lost

_FOLDER: Final = Path("/dev/shm")


class SystemMemory:
    """Implements ``Memory``: what lies from ``offset`` on in the file that ``key`` names."""

    place: Final = str(_FOLDER)

    def __init__(self, key: str, offset: int, descriptor: int) -> None:
        self.described: dict[str, str | int] = {"key": key, "offset": offset}
        self._offset = offset
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self.identity: object = (status.st_dev, status.st_ino)

    def place_bytes(self) -> int:
        folder = os.statvfs(_FOLDER)
        # A file system that was given no size has zero blocks.
        return folder.f_blocks * folder.f_frsize or sys.maxsize

    @classmethod
    def open(cls, key: str, offset: int, byte_size: int, *, prefix: str) -> SystemMemory:
        """Raises ``InvalidInput`` naming what is wrong."""
        plain = key.removeprefix("/")
        if not plain.startswith(prefix) or "/" in plain or "\0" in plain or len(plain) > 255:
            raise InvalidInput.at("key", f"expected a name in /dev/shm that begins with {prefix}")
        if offset < 0:
            raise InvalidInput.at("offset", "expected 0 or more")
        try:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            memory = cls(key, offset, os.open(_FOLDER / plain, flags))
        except OSError as error:
            raise InvalidInput.at("key", f"{clip(key)!r} cannot be opened: {error.strerror}") from None
        found = os.fstat(memory._descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.getuid(), os.geteuid()):
            raise InvalidInput.at("key", "it is no file of this service's own user")
        if offset + byte_size > found.st_size:
            raise InvalidInput.at(
                "byte_size",
                f"offset and size end at {offset + byte_size}, behind the file's {found.st_size} bytes",
            )
        return memory

    def read(self, offset: int, size: int) -> bytes:
        data = os.pread(self._descriptor, size, self._offset + offset)
        if len(data) != size:
            raise Lost("was shortened")
        return data

    def write(self, offset: int, data: bytes) -> None:
        if os.fstat(self._descriptor).st_size < self._offset + offset + len(data):
            raise Lost("was shortened")
        os.pwrite(self._descriptor, data, self._offset + offset)

    def __del__(self) -> None:
        os.close(self._descriptor)
