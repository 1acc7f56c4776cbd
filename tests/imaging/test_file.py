"""Headers of real files, files that lie, and the sizes that decoding then finds."""

from __future__ import annotations

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tessera import imaging
from tessera.errors import InvalidInput, PayloadTooLarge, RequestError, UnsupportedMedia
from tessera.imaging import FORMATS, MAX_PIXELS, Picture, decode

WIDTH, HEIGHT = 37, 22
ORIENTATION = 0x0112


def encoded(
    kind: str, *, orientation: int | None = None, mode: str = "RGB", size: tuple[int, int] = (WIDTH, HEIGHT)
) -> bytes:
    image = Image.new(mode, size, 128)
    options: dict[str, object] = {}
    if orientation is not None:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options["exif"] = exif
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_of_size(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", FORMATS)
def test_sizes(kind: str) -> None:
    assert Picture(encoded(kind), param="input").size == (WIDTH, HEIGHT)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1"])
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "GIF"])
def test_sizes_in_other_modes(kind: str, mode: str) -> None:
    found = Picture(encoded(kind, mode=mode), param="input")
    assert found.size == (WIDTH, HEIGHT)


def test_webp_variants() -> None:
    for options in ({"lossless": True}, {"quality": 50}, {"quality": 50, "exif": Image.Exif()}):
        for size in ((1, 1), (300, 7), (16383, 1)):
            file = io.BytesIO()
            Image.new("RGBA", size).save(file, "WEBP", **options)
            found = Picture(file.getvalue(), param="input")
            assert found.size == size


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_makes_the_size_upright(kind: str, orientation: int) -> None:
    found = Picture(encoded(kind, orientation=orientation), param="input")
    turned = 5 <= orientation <= 8
    assert found.size == ((HEIGHT, WIDTH) if turned else (WIDTH, HEIGHT))


def with_segment(jpeg: bytes, body: bytes) -> bytes:
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + jpeg[2:]


def test_no_orientation_counts_in_xmp_or_behind_the_pixels() -> None:
    plain = encoded("PNG")
    end = plain.index(b"IEND") - 4
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    late = plain[:end] + png_chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + plain[end:]
    xmp = b'<x tiff:Orientation="8"/>'
    described = plain[:33] + png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp) + plain[33:]
    marked = with_segment(encoded("JPEG"), b"http://ns.adobe.com/xap/1.0/\0" + xmp)
    for data in (late, described, marked):
        found = Picture(data, param="input")
        assert found.size == (WIDTH, HEIGHT) == decode(data, param="input").size


def tiff(*entries: tuple[int, int, int, int], rest: bytes = b"") -> bytes:
    """A little-endian TIFF with one directory of (tag, kind, count, value)."""
    table = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + table + bytes(4) + rest


def test_a_tiff_is_turned_by_its_tag_alone() -> None:
    xmp = b'<x tiff:Orientation="8"/>'
    behind = 8 + 2 + 12 * 8 + 4
    entries = [(256, 4, 1, 4), (257, 4, 1, 2), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    entries += [(273, 4, 1, behind), (279, 4, 1, 8), (700, 7, len(xmp), behind + 8)]
    data = tiff(*entries, rest=bytes(8) + xmp)
    found = Picture(data, param="input")
    assert found.size == (4, 2) == decode(data, param="input").size


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FORMATS)
def test_the_size_in_the_header_is_that_of_the_decoded_image(kind: str) -> None:
    seeds = [encoded(kind)]
    if kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        seeds += [encoded(kind, orientation=6), encoded(kind, orientation=3)]
    source = np.random.default_rng(len(kind))
    agreed = 0
    for _ in range(300):
        data = bytearray(seeds[source.integers(len(seeds))])
        for _ in range(source.integers(0, 4)):
            data[source.integers(len(data))] = source.integers(256)
        try:
            image = decode(bytes(data), param="input")
        except RequestError:
            continue
        found = Picture(bytes(data), param="input")
        assert found.size == image.size
        agreed += 1
    assert agreed > 50


@pytest.mark.filterwarnings("ignore")
def test_unreadable_exif_counts_as_none() -> None:
    for block in (b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0II*\0\x08\0\0\0\xff\xff"):
        data = with_segment(encoded("JPEG"), block)
        assert Picture(data, param="input").size[0] == WIDTH == decode(data, param="input").size[0]


def test_limits() -> None:
    assert Picture(encoded("PNG"), param="input", max_pixels=WIDTH * HEIGHT).size[0] == WIDTH
    with pytest.raises(PayloadTooLarge) as caught:
        Picture(encoded("PNG"), param="input[3]", max_pixels=WIDTH * HEIGHT - 1)
    assert caught.value.param == "input[3]"
    assert f"{WIDTH}x{HEIGHT}" in caught.value.message
    assert str(WIDTH * HEIGHT - 1) in caught.value.message


def test_a_bomb_is_refused_from_its_header_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for data in (png_of_size(60_000, 60_000), png_of_size(2**32 - 1, 2**32 - 1)):
            with pytest.raises(PayloadTooLarge, match=r"has \d{10,20} pixels, the limit is 1000 in all"):
                Picture(data, param="input", max_pixels=1000)
    with pytest.raises(PayloadTooLarge, match=f"has 400000000 pixels, the limit is {MAX_PIXELS} in all"):
        Picture(png_of_size(20_000, 20_000), param="input")


def test_a_gif_frame_can_be_larger_than_its_screen() -> None:
    data = bytearray(encoded("GIF"))
    data[6:10] = struct.pack("<HH", 1, 1)
    with Image.open(io.BytesIO(data)) as image:
        assert Picture(bytes(data), param="input").size == image.size


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GIF",
        b"<svg xmlns='http://www.w3.org/2000/svg' width='10' height='10'/>",
        b"%PDF-1.7",
        b"RIFF\0\0\0\0WAVEfmt ",
        b"\0\0\0\x18ftypmp42",
        b"\0\0\0\x0cJXL \r\n\x87\n",
        b"%!PS-Adobe-3.0",
    ],
)
def test_other_content_is_unsupported(data: bytes) -> None:
    with pytest.raises(UnsupportedMedia) as caught:
        Picture(data, param="input[0]")
    assert caught.value.param == "input[0]"
    assert "JPEG" in caught.value.message


@pytest.mark.parametrize("kind", FORMATS)
def test_files_cut_anywhere_never_crash(kind: str) -> None:
    data = encoded(kind, orientation=6) if kind in ("JPEG", "PNG", "WEBP", "TIFF") else encoded(kind)
    for end in range(min(len(data), 400)):
        try:
            Picture(data[:end], param="input")
        except RequestError as error:
            assert error.param == "input"


def test_broken_headers_say_so() -> None:
    for data in (
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8\xff\xe0\0\x00",
        b"\x89PNG\r\n\x1a\n" + b"\0" * 30,
        png_of_size(0, 5),
        b"GIF89a" + b"\0" * 20,
        b"BM" + b"hello, this is no bitmap at all",
        b"II*\0\x08\0\0\0\x00\x00",
        b"RIFF\0\0\0\0WEBPVP8 " + b"\0" * 20,
        b"RIFF\0\0\0\0WEBPVP9 " + b"\0" * 20,
    ):
        with pytest.raises((InvalidInput, UnsupportedMedia)):
            Picture(data, param="input")


_SEEDS = [encoded(kind) for kind in FORMATS] + [
    encoded(kind, orientation=6) for kind in ("JPEG", "PNG", "WEBP", "TIFF")
]


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(_SEEDS),
    st.lists(st.tuples(st.integers(0, 300), st.binary(min_size=1, max_size=4)), min_size=1, max_size=5),
)
def test_mutated_files_are_read_or_refused(seed: bytes, changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(seed)
    for at, patch in changes:
        data[at : at + len(patch)] = patch
    try:
        found = Picture(bytes(data), param="input")
    except RequestError as error:
        assert error.param == "input"
    else:
        assert min(found.size) > 0


@pytest.mark.filterwarnings("ignore")
def test_headers_cost_little_whatever_they_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    read = imaging._MeteredFile.read
    sizes: list[int] = []

    def counted(file: imaging._MeteredFile, size: int | None = -1, /) -> bytes:
        found = read(file, size)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(imaging._MeteredFile, "read", counted)
    nothing = struct.pack(">I4sI", 0, b"junk", 0)
    frame = b"\xff\xd8\xff\xc0\0\x0b\x08\0\5\0\4\1\1\x11\0"
    size = [(256, 4, 1, 1000), (257, 4, 1, 1000), (258, 3, 1, 8), (262, 3, 1, 1)]
    text = b"k\0\0" + zlib.compress(bytes(30_000_000))
    costly = {
        "chunks": png_of_size(5, 5)[:33] + nothing * 1_000_000,
        "segments": b"\xff\xd8" + b"\xff\xe2\x00\x02" * 4_000_000,
        "segments behind the frame header": frame + b"\xff\xe2\x00\x02" * 4_000_000,
        "fill": b"\xff\xd8" + b"\xff" * 16_000_000,
        "extensions": b"GIF89a\1\0\1\0\0\0\0" + b"\x21\xfe\0" * 5_000_000,
        "comments": b"GIF89a\1\0\1\0\0\0\0\x21\xfe" + b"\1a" * 8_000_000,
        "compressed text": png_of_size(5, 5)[:33] + png_chunk(b"zTXt", text) * 100,
        "strips": tiff(*size, (273, 4, 5_000_000, 74), (278, 4, 1, 1), rest=bytes(20_000_000)),
    }
    for name, data in costly.items():
        sizes.clear()
        with pytest.raises((InvalidInput, UnsupportedMedia)):
            Picture(data, param="input")
        # Of millions of blocks, and of tables of megabytes.
        assert 0 < len(sizes) <= 20_001, name
        assert sum(sizes) <= 4 * len(data) + 1024, name
