"""A cache that several processes of one host share, without locks."""

from __future__ import annotations

import mmap
import os
import struct
from typing import Final
from zlib import crc32

# Of an arena's head: how far it has been written, and how far that has been overwritten.
_HEAD: Final = 0
_TAIL: Final = 1
_HEAD_WORDS: Final = 8
_WAYS: Final = 4
KEY_BYTES: Final = 32
# Before each value: its key, its length, and the checksum of both.
_ENTRY: Final = struct.Struct(f"<{KEY_BYTES}sII")
_TAG: Final = 0xFFFF


class SharedCache:
    """Maps keys of 32 random bytes to bytes in a file that ``size`` processes map; of ``capacity`` bytes.

    Each process writes an arena of its own, a ``size``-th of the capacity, and reads all. An arena is written
    from its beginning to its end and over again: what was put first makes room, and what is used while it is
    in the older half of an arena is put anew by its reader, so that it stays. A process that is killed while
    it writes leaves an entry that nobody finds; one that is frozen keeps nobody from anything. What is found
    is checked: the place was not written over meanwhile, and key and checksum are right. The next process
    with the same ``index`` goes on with the arena. The index has room for as many entries of ``entry_bytes``
    as there may be; smaller ones push each other out of it. Owned by one event loop.

    The cache takes ``file_bytes`` of the file (a descriptor) from ``offset``, a multiple of the page size.
    """

    def __init__(
        self, file: int, *, offset: int, index: int, size: int, capacity: int, entry_bytes: int
    ) -> None:
        self._buckets, self._data, self._bytes = _layout(size, capacity, entry_bytes)
        words = self._data + self._bytes // 8
        self.file_bytes = file_bytes(size=size, capacity=capacity, entry_bytes=entry_bytes)
        # The last byte is nobody's. Not ftruncate: of two at the same time one could make it smaller.
        os.pwrite(file, b"\0", offset + self.file_bytes - 1)
        memory = memoryview(mmap.mmap(file, self.file_bytes, offset=offset))
        self._words = memory.cast("q")
        self._memory = memory
        self._own = index * words
        self._arenas = [self._own, *(at * words for at in range(size) if at != index)]

    @property
    def used(self) -> int:
        """Bytes of what has been written and not been overwritten, in all arenas."""
        return sum(self._words[arena + _HEAD] - self._words[arena + _TAIL] for arena in self._arenas)

    def get(self, key: bytes) -> bytes | None:
        """A value that some process has put under the key; None where there is none."""
        for arena in self._arenas:
            found = self._find(arena, key)
            if found is not None:
                value, at = found
                if self._words[arena + _HEAD] - at > self._bytes // 2:
                    self.put(key, value)
                return value
        return None

    def get_all(self, key: bytes) -> list[bytes]:
        """What each process has put last under the key."""
        found = [self._find(arena, key) for arena in self._arenas]
        return [one[0] for one in found if one is not None]

    def put(self, key: bytes, value: bytes) -> None:
        """Store a value; one that is larger than an arena is not."""
        nbytes = -(-(_ENTRY.size + len(value)) // 8) * 8
        if nbytes > self._bytes:
            return
        words, own = self._words, self._own
        at = words[own + _HEAD]
        if at % self._bytes + nbytes > self._bytes:
            # An entry is never parted.
            at += self._bytes - at % self._bytes
        # Before anything is overwritten: whoever reads it now finds that out.
        words[own + _TAIL] = max(words[own + _TAIL], at + nbytes - self._bytes)
        begin = 8 * (own + self._data) + at % self._bytes
        head = _ENTRY.pack(key, len(value), crc32(value, crc32(key)))
        self._memory[begin : begin + len(head)] = head
        self._memory[begin + len(head) : begin + len(head) + len(value)] = value
        words[own + _HEAD] = at + nbytes
        places, tag = self._places(own, key)
        oldest = min(places, key=lambda place: words[place] if words[place] & _TAG != tag else -1)
        words[oldest] = (at // 8 + 1) << 16 | tag

    def _places(self, arena: int, key: bytes) -> tuple[range, int]:
        """The words of the index that a key may stand in, and the mark that it has there."""
        begin = arena + _HEAD_WORDS + int.from_bytes(key[:6], "little") % self._buckets * _WAYS
        return range(begin, begin + _WAYS), int.from_bytes(key[6:8], "little")

    def _find(self, arena: int, key: bytes) -> tuple[bytes, int] | None:
        """The value, and where in the arena's history it was written."""
        words = self._words
        places, tag = self._places(arena, key)
        for place in places:
            word = words[place]
            if not word or word & _TAG != tag:
                continue
            at = ((word >> 16) - 1) * 8
            if at < words[arena + _TAIL]:
                continue
            begin = 8 * (arena + self._data) + at % self._bytes
            named, length, checksum = _ENTRY.unpack_from(self._memory, begin)
            if named != key or at % self._bytes + _ENTRY.size + length > self._bytes:
                continue
            value = bytes(self._memory[begin + _ENTRY.size : begin + _ENTRY.size + length])
            if at >= words[arena + _TAIL] and crc32(value, crc32(key)) == checksum:
                return value, at
        return None


def file_bytes(*, size: int, capacity: int, entry_bytes: int) -> int:
    """What a ``SharedCache`` takes of its file: whole pages."""
    _, data, nbytes = _layout(size, capacity, entry_bytes)
    whole = 8 * (data + nbytes // 8) * size + 1
    return -(-whole // mmap.PAGESIZE) * mmap.PAGESIZE


def _layout(size: int, capacity: int, entry_bytes: int) -> tuple[int, int, int]:
    """Of an arena: the buckets of its index, the words before its data, and the bytes of those."""
    share = capacity // size
    buckets = 1 << (max(_WAYS, share // entry_bytes) // _WAYS).bit_length() - 1
    data = _HEAD_WORDS + _WAYS * buckets
    return buckets, data, max(0, share // 8 - data) * 8
