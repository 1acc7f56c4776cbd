"""PNG files whose chunks that a picture can do without are damaged: they are left out, as libpng does.

A chunk whose name begins with a small letter is such an ancillary one (PNG, third edition, 5.4). Browsers
leave it out where its checksum is wrong; Pillow refuses the file.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

MAGIC: Final = b"\x89PNG\r\n\x1a\n"
# Beside the data: length, name, checksum.
_AROUND: Final = 12
_MAX_CHUNKS: Final = 10_000
_SMALL: Final = 0x20


def without_damage(data: bytes) -> bytes | None:
    """Return the file without its damaged ancillary chunks before the pixels; None where none is damaged.

    What is no chunk, and what follows the first of the pixels, stays as it is.
    """
    kept, at, begun = [data[: len(MAGIC)]], len(MAGIC), len(MAGIC)
    for _ in range(_MAX_CHUNKS):
        if at + _AROUND > len(data):
            break
        size, name = struct.unpack_from(">I4s", data, at)
        end = at + _AROUND + size
        if name == b"IDAT" or end > len(data):
            break
        if name[0] & _SMALL and zlib.crc32(data[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end], "big"):
            kept.append(data[begun:at])
            begun = end
        at = end
    if begun == len(MAGIC):
        return None
    return b"".join([*kept, data[begun:]])
