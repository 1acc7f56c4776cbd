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


def animated(left_out: bytes = b"", *, default: bool, changed: tuple[int, bytes] = (0, b"")) -> bytes:
    """Red, then green frames, with the picture before them or as the first; without its first such chunk, or
    with another piece in its first fcTL."""
    file = io.BytesIO()
    red, green = (Image.new("RGB", (8, 6), colour) for colour in ("red", "lime"))
    red.save(file, "PNG", save_all=True, append_images=[green, red], default_image=default)
    data, found, at = file.getvalue(), [png.MAGIC], len(png.MAGIC)
    while at < len(data):
        size, name = struct.unpack_from(">I4s", data, at)
        content = data[at + 8 : at + 8 + size]
        at += 12 + size
        if name == left_out:
            left_out = b""
            continue
        if name == b"fcTL" and changed[1]:
            place, piece = changed
            content, changed = content[:place] + piece + content[place + len(piece) :], (0, b"")
        found.append(chunk(name, content))
    return b"".join(found)


def test_a_damaged_animation_is_its_picture_or_refused() -> None:
    """Browsers show the picture where nothing says that there are frames, and an empty canvas elsewhere."""
    for default, first in ((True, (0, 255, 0)), (False, (255, 0, 0))):
        assert Picture(animated(default=default), param="x").image.getpixel((3, 3)) == first
        still = Picture(animated(b"acTL", default=default), param="x").image
        assert still.getpixel((3, 3)) == (255, 0, 0)
        wide = struct.pack(">I", 999)
        for data in (animated(b"fcTL", default=default), animated(default=default, changed=(4, wide))):
            with pytest.raises(RequestError, match="damaged"):
                _ = Picture(data, param="x").image
    with pytest.raises(RequestError, match="x is a damaged image: APNG missing frame data"):
        _ = Picture(animated(b"fdAT", default=True), param="x").image


def test_what_no_picture_needs_is_left_out() -> None:
    texts = zlib.compress(bytes(8 << 20))
    long = chunk(b"zTXt", b"a\0\0" + texts), chunk(b"iCCP", b"a\0\0" + texts)
    for data in (with_chunks(*long), with_chunks(chunk(b"cICP", b"\x09\x10\0\x01"), chunk(b"tEXt", b""))):
        assert Picture(data, param="x").image.getpixel((3, 3)) == (10, 200, 30)
    behind = picture()[:-12] + b"".join(long) + picture()[-12:]
    assert png.needed(behind) == picture()
    assert Picture(behind, param="x").image.getpixel((3, 3)) == (10, 200, 30)


def test_nothing_is_left_out_of_what_a_picture_needs() -> None:
    whole = with_chunks(chunk(b"gAMA", struct.pack(">I", 45455)), chunk(b"eXIf", b"MM\0*"))
    assert png.needed(whole) is whole
    damaged = with_chunks(chunk(b"tEXt", b"a\0b", damaged=True))
    assert png.needed(damaged) == picture()
    for end in range(len(damaged)):
        assert len(png.needed(damaged[:end])) <= end


@pytest.mark.parametrize(("gamma", "shows"), [(100_000, 188), (45_455, 128), (220_000, 222)])
def test_samples_of_another_brightness_are_shown_as_srgb(gamma: int, shows: int) -> None:
    """As the formula of PNG 13.13 has it, by hand."""
    mark = chunk(b"gAMA", struct.pack(">I", gamma))
    for mode in ("RGB", "RGBA", "L", "P", "I;16"):
        file = io.BytesIO()
        grey = Image.new("L", (8, 6), 128)
        wide = Image.new("I;16", (8, 6), 128 * 257)
        (wide if mode == "I;16" else grey.convert(mode)).save(file, "PNG")
        data = file.getvalue()[:33] + mark + file.getvalue()[33:]
        found = Picture(data, param="x").image.getpixel((3, 3))
        assert found == pytest.approx((shows,) * 3, abs=1), mode
        profiled = data[:33] + chunk(b"sRGB", b"\0") + data[33:]
        assert Picture(profiled, param="x").image.getpixel((3, 3)) == (128, 128, 128)


def animation(*, default: bool) -> bytes:
    """Red, then green, on a canvas larger than both; ``default`` stands before them and is no part of it."""
    frames = [Image.new("RGBA", (8, 6), colour) for colour in ((200, 0, 0, 255), (0, 200, 0, 255))]
    first = Image.new("RGBA", (8, 6), (0, 0, 200, 255))
    file = io.BytesIO()
    shown = [first, *frames] if default else frames
    shown[0].save(file, "PNG", save_all=True, append_images=shown[1:], default_image=default)
    return file.getvalue()


@pytest.mark.parametrize("default", [False, True])
def test_of_an_animation_the_first_frame_is_shown(default: bool) -> None:
    """A picture before it is for programs that show no animation: Chromium does not show it."""
    image = Picture(animation(default=default), param="x").image
    assert image.size == (8, 6) and image.getpixel((3, 3)) == (200, 0, 0)
