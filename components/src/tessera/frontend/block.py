"""Bytes that come in parts, in one block of memory from the first part on."""

from __future__ import annotations

import ctypes
from io import BytesIO
from typing import Final

from tessera.free_memory import free_aside

# Of the C API: bytes that are not set. Their pages are none before they are written to.
_UNSET: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
# What grows to so much is copied in less than a millisecond.
_GROWN_BYTES: Final = 1 << 20


class Block:
    """Gathers parts of bytes of which so many are announced, or at most so many are to come.

    Parts that are joined at the end are there twice meanwhile, and the heap keeps what they leave: of 17
    pictures of 12 MiB that came together, 118 MB. What grows is copied as a whole again and again: up to
    41 MB in one turn of the loop, in 10,000 new pages, which takes 29 ms. With room for all of it, no part
    of 64 KiB takes more than 0.2.
    """

    def __init__(self, announced: int | None, most: int) -> None:
        self._most = most
        self._grows = announced is None
        self._room = _room(announced or 0)

    @property
    def nbytes(self) -> int:
        """Return the bytes that have come."""
        return self._room.tell()

    def add(self, part: bytes) -> None:
        """Put a part behind those before it."""
        if self._grows and self.nbytes + len(part) > _GROWN_BYTES:
            self._grows = False
            grown, self._room = self._room, _room(self._most)
            self._room.write(grown.getbuffer())
        self._room.write(part)

    def take(self) -> bytes:
        """Return all that has come, which is not copied: 60 MB stop the loop for 70 ms."""
        self._room.truncate()
        return self._room.getvalue()

    def drop(self) -> None:
        """Free what has come of bytes that nobody wants any more."""
        free_aside(self._room.close, self.nbytes)


def _room(nbytes: int) -> BytesIO:
    return BytesIO(_UNSET(None, nbytes))
