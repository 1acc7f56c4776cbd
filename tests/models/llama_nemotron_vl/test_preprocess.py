from __future__ import annotations

import struct
import warnings
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tessera.errors import InvalidInput, PayloadTooLarge, UnsupportedMedia
from tessera.imaging import Picture, decode
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tests.models.llama_nemotron_vl.conftest import MakeCheckpoint
from tests.references.llama_nemotron_vl import Reference


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def gradient(width: int = 90, height: int = 40) -> Image.Image:
    source = np.random.default_rng(width * height)
    ramp = np.add.outer(np.arange(height) * 2, np.arange(width))[..., None] + [0, 60, 120]
    return Image.fromarray(((ramp + source.integers(0, 40, ramp.shape)) % 256).astype(np.uint8))


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(decode(data, param="input[0]"))


@pytest.fixture(scope="module")
def path(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint()


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


def assert_as_reference(model: LlamaNemotronVL, reference: Reference, data: bytes) -> None:
    expected = np.stack(reference.tiles(data)).transpose(0, 3, 1, 2)
    tiles = model.preprocess(Picture(data, param="input[0]")).values
    assert tiles.dtype == np.uint8
    assert tiles.flags.c_contiguous
    np.testing.assert_array_equal(tiles, expected)


@pytest.mark.parity
@pytest.mark.parametrize("size", [(64, 64), (80, 60), (33, 200), (400, 20), (1, 1), (3, 2), (301, 299)])
def test_pixels_equal_the_reference(
    small: LlamaNemotronVL, reference: Reference, size: tuple[int, int]
) -> None:
    data = encoded(gradient(*size))
    assert_as_reference(small, reference, data)
    assert len(small.preprocess(Picture(data, param="x")).values) == small.plan(*size, param="x").units


@pytest.mark.parity
def test_photographs_at_full_size(make_checkpoint: MakeCheckpoint, photos: dict[str, bytes]) -> None:
    path = make_checkpoint(image_size=512)
    model, reference = LlamaNemotronVL(path), Reference(path)
    for data in photos.values():
        assert_as_reference(model, reference, data)


@pytest.mark.parity
@pytest.mark.parametrize(
    "changes", [{"use_thumbnail": False}, {"dynamic_image_size": False}, {"max_input_tiles": 2}]
)
def test_options_equal_the_reference(make_checkpoint: MakeCheckpoint, changes: dict[str, Any]) -> None:
    path = make_checkpoint(**changes)
    assert_as_reference(LlamaNemotronVL(path), Reference(path), encoded(gradient(200, 100)))


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_every_served_format(small: LlamaNemotronVL, reference: Reference, kind: str) -> None:
    assert_as_reference(small, reference, encoded(gradient(), kind))


@pytest.mark.parity
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_modes_equal_the_reference(small: LlamaNemotronVL, reference: Reference, mode: str) -> None:
    assert_as_reference(small, reference, encoded(gradient().convert(mode)))


@pytest.mark.parity
def test_cmyk_equals_the_reference(small: LlamaNemotronVL, reference: Reference) -> None:
    assert_as_reference(small, reference, encoded(gradient().convert("CMYK"), "JPEG"))
    assert_as_reference(small, reference, encoded(gradient().convert("CMYK"), "TIFF"))


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(small: LlamaNemotronVL, reference: Reference, orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(gradient(), kind, exif=exif)
    assert_as_reference(small, reference, data)
    assert decode(data, param="x").size == ((90, 40) if orientation < 5 else (40, 90))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_unreadable_orientation_means_upright() -> None:
    assert decode(encoded(gradient(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"), param="x").size == (
        90,
        40,
    )
    exif = Image.Exif()
    exif[0x0112] = 77
    assert decode(encoded(gradient(), "JPEG", exif=exif), param="x").size == (90, 40)


def test_transparency_shows_white() -> None:
    clear = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    clear.putpixel((1, 0), (10, 20, 30, 255))
    np.testing.assert_array_equal(pixels(encoded(clear)), [[[255, 255, 255], [10, 20, 30]]])
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 128))
    np.testing.assert_array_equal(pixels(encoded(half)), [[[127, 127, 127]]])


def test_a_transparent_palette_colour_shows_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([200, 0, 0, 0, 200, 0])
    image.putpixel((1, 0), 1)
    for kind in ("PNG", "GIF"):
        np.testing.assert_array_equal(
            pixels(encoded(image, kind, transparency=0)), [[[255, 255, 255], [0, 200, 0]]]
        )


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    samples = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    expected = np.array([0, 0, 1, 128, 255], dtype=np.uint8)
    for kind in ("PNG", "TIFF"):
        found = pixels(encoded(Image.fromarray(samples), kind))
        np.testing.assert_array_equal(found, np.repeat(expected[None, :, None], 3, axis=2))
    keyed = pixels(encoded(Image.fromarray(samples), "PNG", transparency=256))
    np.testing.assert_array_equal(keyed[0, :, 0], [0, 0, 255, 128, 255])


@pytest.mark.parametrize("channels", [3, 4])
def test_sixteen_bit_colour_keeps_the_high_byte(channels: int) -> None:
    values = [0x1234, 0x8001, 0xFFFF, 0xFFFF][:channels]
    data = _png(1, 1, depth=16, colour=2 if channels == 3 else 6, rows=struct.pack(f">{channels}H", *values))
    np.testing.assert_array_equal(pixels(data), [[[0x12, 0x80, 0xFF]]])


def test_the_first_frame_counts() -> None:
    first, second = gradient(), Image.new("RGB", (90, 40))
    for kind in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(first, kind, save_all=True, append_images=[second], **options)
        alone = encoded(first, kind, **options)
        np.testing.assert_array_equal(pixels(data), pixels(alone))


def test_pages_are_no_frames() -> None:
    pages = encoded(gradient(), "TIFF", save_all=True, append_images=[Image.new("RGB", (90, 40))])
    with pytest.raises(InvalidInput, match=r"input\[0\] is a TIFF file of several pages"):
        pixels(pages)


@pytest.mark.parametrize(("dtype", "said"), [(np.float32, "floating-point"), (np.int32, "signed")])
def test_wider_samples_are_refused(dtype: type[np.generic], said: str) -> None:
    wide = Image.fromarray(np.full((4, 4), 70000, dtype=dtype))
    with pytest.raises(UnsupportedMedia, match=rf"input\[0\] is a TIFF file of {said} samples"):
        pixels(encoded(wide, "TIFF"))


@pytest.mark.parametrize(
    "data",
    [b"", b"not an image", b"\x89PNG\r\n\x1a\n", b"<svg xmlns='http://www.w3.org/2000/svg'/>"],
    ids=["empty", "text", "signature", "svg"],
)
def test_what_is_no_image(small: LlamaNemotronVL, data: bytes) -> None:
    with pytest.raises((UnsupportedMedia, InvalidInput)) as caught:
        small.preprocess(Picture(data, param="input[0].image"))
    assert caught.value.param == "input[0].image"
    assert "input[0].image" in str(caught.value)


def test_formats_that_are_not_served() -> None:
    for kind in ("PPM", "ICO", "TGA", "PCX"):
        with pytest.raises(
            UnsupportedMedia, match=r"which is not read as an image|no image of a served format"
        ):
            pixels(encoded(gradient(), kind))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_cut_short_or_scrambled_is_an_error_of_ours(kind: str) -> None:
    data = encoded(gradient(), kind)
    source = np.random.default_rng(7)
    broken = [data[:length] for length in range(0, len(data), max(1, len(data) // 40))]
    for _ in range(40):
        changed = bytearray(data)
        for position in source.integers(0, len(data), 8):
            changed[position] = source.integers(256)
        broken.append(bytes(changed))
    refused = 0
    for attempt in broken:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                pixels(attempt)
            except (InvalidInput, UnsupportedMedia) as error:
                assert error.param == "input[0]"
                refused += 1
    assert refused > 10


def test_a_decompression_bomb_is_refused() -> None:
    bomb = _png(40_000, 40_000, depth=1, colour=0, rows=b"")
    with pytest.raises(PayloadTooLarge, match="1600000000 pixels, the limit is"):
        pixels(bomb)
    with pytest.raises(PayloadTooLarge, match=r"(144000000|12000x12000) pixels, the limit is"):
        pixels(_png(12_000, 12_000, depth=1, colour=0, rows=b""))


def test_threads_do_not_disturb_each_other(small: LlamaNemotronVL) -> None:
    images = [encoded(gradient(20 + 7 * n, 90)) for n in range(8)]
    alone = [small.preprocess(Picture(data, param="x")).values for data in images]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda data: small.preprocess(Picture(data, param="x")).values, images * 4))
    for position, tiles in enumerate(together):
        np.testing.assert_array_equal(tiles, alone[position % 8])


def _png(width: int, height: int, *, depth: int, colour: int, rows: bytes) -> bytes:
    """A PNG with one unfiltered row."""
    import zlib

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = zlib.compress(b"\0" + rows)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
