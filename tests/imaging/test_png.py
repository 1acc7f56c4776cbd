"""PNG files with damaged chunks that are not needed."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from PIL import Image

from tessera import png
from tessera.errors import RequestError
from tessera.imaging import Picture


def chunk(name: bytes, data: bytes, *, damaged: bool = False) -> bytes:
    checksum = zlib.crc32(name + data) ^ damaged
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)


def picture(mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 6), (10, 200, 30)).convert(mode).save(file, "PNG")
    return file.getvalue()


def with_chunks(*chunks: bytes, mode: str = "RGB") -> bytes:
    """Behind the header, which is 25 bytes behind 8."""
    data = picture(mode)
    return data[:33] + b"".join(chunks) + data[33:]


def test_a_damaged_chunk_that_is_not_needed_is_left_out() -> None:
    good = chunk(b"tEXt", b"a\0b")
    for damaged in (
        chunk(b"tEXt", b"a\0b", damaged=True),
        chunk(b"gAMA", bytes(4), damaged=True),
        chunk(b"iCCP", b"\xff" * 40, damaged=True),
        # Without it, nothing is transparent.
        chunk(b"tRNS", struct.pack(">3H", 10, 200, 30), damaged=True),
    ):
        for chunks in ((damaged,), (good, damaged, good), (damaged, damaged)):
            image = Picture(with_chunks(*chunks), param="x").image
            assert image.size == (8, 6) and image.getpixel((3, 3)) == (10, 200, 30)
    kept = chunk(b"tRNS", struct.pack(">3H", 10, 200, 30))
    damaged = chunk(b"tEXt", b"a\0b", damaged=True)
    assert Picture(with_chunks(damaged, kept), param="x").image.getpixel((3, 3)) == (255, 255, 255)


def test_a_damaged_chunk_that_is_needed_is_damage() -> None:
    data = picture("P")
    place = data.index(b"PLTE")
    changed = bytearray(data)
    changed[place + 4] ^= 1
    with pytest.raises(RequestError):
        _ = Picture(bytes(changed), param="x").image


def test_nothing_is_left_out_of_a_whole_file_and_of_none() -> None:
    assert png.without_damage(picture()) is None
    assert png.without_damage(with_chunks(chunk(b"tEXt", b"a\0b"))) is None
    damaged = with_chunks(chunk(b"tEXt", b"a\0b", damaged=True))
    assert png.without_damage(damaged) == picture()
    for end in range(len(damaged)):
        rest = png.without_damage(damaged[:end])
        assert rest is None or len(rest) < end
