"""PNG files without what no picture needs: texts, profiles, and chunks that are damaged.

A chunk whose name begins with a small letter is ancillary (PNG, third edition, 5.4). Browsers leave out those
whose checksum is wrong; Pillow refuses the file, and one with long texts or a profile of a megabyte as well.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

MAGIC: Final = b"\x89PNG\r\n\x1a\n"
# Beside the data: length, name, checksum.
_AROUND: Final = 12
_MAX_CHUNKS: Final = 20_000
_SMALL: Final = 0x20
# Ancillary ones that say how a picture looks: transparency, frames, orientation, brightness.
_LOOKS: Final = (b"tRNS", b"acTL", b"fcTL", b"fdAT", b"eXIf", b"gAMA", b"sRGB")
_PROFILES: Final = (b"iCCP", b"cICP")


def needed(data: bytes) -> bytes:
    """Return the file without the chunks that no picture needs; what is no chunk stays as it is.

    Where a profile says what the colours are, gAMA does not count.
    """
    chunks: list[tuple[bytes, int, int]] = []
    at = len(MAGIC)
    for _ in range(_MAX_CHUNKS):
        if at + _AROUND > len(data):
            break
        size, name = struct.unpack_from(">I4s", data, at)
        end = at + _AROUND + size
        if end > len(data):
            break
        chunks.append((name, at, end))
        at = end
    profiled = any(name in _PROFILES for name, _, _ in chunks)
    left_out = [
        (begin, end)
        for name, begin, end in chunks
        if name[0] & _SMALL and not (_shows(name, profiled) and _whole(data, begin, end))
    ]
    if not left_out:
        return data
    ends = [*(begin for begin, _ in left_out), len(data)]
    begins = [0, *(end for _, end in left_out)]
    return b"".join(data[begin:end] for begin, end in zip(begins, ends, strict=True))


def _shows(name: bytes, profiled: bool) -> bool:
    return name in _LOOKS and not (profiled and name == b"gAMA")


def _whole(data: bytes, begin: int, end: int) -> bool:
    return zlib.crc32(data[begin + 4 : end - 4]) == int.from_bytes(data[end - 4 : end], "big")
