"""Pictures of any file, written in any size and order; plain JPEG files to the bit as Pillow decodes them."""

from __future__ import annotations

import io
import struct

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from tessera import imaging
from tessera.errors import InvalidInput, PayloadTooLarge, RequestError, UnsupportedMedia
from tessera.imaging import FORMATS, Picture, decode, plain_jpeg_pixels, plain_jpeg_size
from tests.imaging.test_file import encoded

WIDTH, HEIGHT = 75, 50
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
PLAIN = {
    "baseline": {},
    "fine": {"quality": 98, "subsampling": "4:4:4"},
    "coarse": {"quality": 10, "subsampling": "4:2:2"},
    "progressive": {"progressive": True, "optimize": True},
    "restarts": {"restart_marker_blocks": 3},
    "comment": {"comment": b"\xff\xc0 of no frame"},
    "profile": {"icc_profile": PROFILE},
    "rgb": {"keep_rgb": True},
    "resolution": {"dpi": (300, 300)},
}


def photo(width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    random = np.random.default_rng(width * height)
    coarse = random.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def saved(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def written(picture: Picture, size: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
    """uint8 ``[height, width, 3]``."""
    width, height = size or picture.size
    planes = np.empty((3, height, width), np.uint8)
    picture.write(planes, (width, height))
    return planes.transpose(1, 2, 0)


def with_segment(kind: int, body: bytes) -> bytes:
    """A plain JPEG that begins with a segment more."""
    data = saved(photo())
    return data[:2] + struct.pack(">BBH", 0xFF, kind, 2 + len(body)) + body + data[2:]


def by_pillow(data: bytes) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("size", [(WIDTH, HEIGHT), (64, 64), (1, 1), (17, 3)])
def test_a_plain_jpeg_is_decoded_as_by_pillow(options: dict[str, object], size: tuple[int, int]) -> None:
    data = saved(photo(*size), **options)
    assert plain_jpeg_size(data) == size
    assert plain_jpeg_pixels(data, size) is not None
    picture = Picture(data, param="input")
    assert picture.size == size
    np.testing.assert_array_equal(written(picture), by_pillow(data))
    image = Picture(data, param="input").image
    assert image.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(image), by_pillow(data))


@pytest.mark.parametrize(
    "data",
    [
        saved(photo().convert("L")),
        saved(photo().convert("CMYK")),
        saved(photo(), "PNG"),
        saved(photo(), exif=b"Exif\0\0II*\0\x08\0\0\0\0\0"),
        saved(photo(), "MPO", save_all=True, append_images=[photo()]),
        with_segment(0xE2, b"ICC_PROFILE\0"),
        with_segment(0xE2, b"ICC_PROFILE\0\1"),
        with_segment(0xE2, b"MPF\0"),
        with_segment(0xE0, b"JFIF"),
        with_segment(0xEE, b"Adobe"),
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8",
        b"",
    ],
    ids=[
        *("grey", "cmyk", "png", "exif", "several", "no number", "one number", "unknown", "short JFIF"),
        *("short Adobe", "empty", "start", "nothing"),
    ],
)
def test_what_is_not_plain_is_left_to_pillow(data: bytes) -> None:
    assert plain_jpeg_size(data) is None
    assert plain_jpeg_pixels(data, (WIDTH, HEIGHT)) is None


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(photo(), exif=exif)
    picture = Picture(data, param="input")
    assert picture.size == ((HEIGHT, WIDTH) if orientation >= 5 else (WIDTH, HEIGHT))
    np.testing.assert_array_equal(written(picture), np.asarray(decode(data, param="input")))


@pytest.mark.parametrize("kind", FORMATS)
def test_resized_and_not(kind: str) -> None:
    data = saved(photo(), kind)
    picture, expected = Picture(data, param="input"), Image.open(io.BytesIO(data)).convert("RGB")
    for size in ((WIDTH, HEIGHT), (WIDTH // 2, HEIGHT // 2), (WIDTH, 2 * HEIGHT), (WIDTH, HEIGHT)):
        resized = expected.resize(size, Image.Resampling.BICUBIC)
        np.testing.assert_array_equal(written(picture, size), np.asarray(resized))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_planes_cut_into_tiles(kind: str) -> None:
    data = saved(photo(96, 64), kind)
    tiles = np.empty((2, 3, 3, 32, 32), np.uint8)
    Picture(data, param="input").write(tiles.transpose(2, 0, 3, 1, 4), (96, 64))
    whole = by_pillow(data)
    for row in range(2):
        for column in range(3):
            found = whole[32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
            np.testing.assert_array_equal(tiles[row, column], found.transpose(2, 0, 1))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_limit_of_pixels(kind: str) -> None:
    data = saved(photo(), kind)
    assert Picture(data, param="input", max_pixels=WIDTH * HEIGHT).size == (WIDTH, HEIGHT)
    with pytest.raises(PayloadTooLarge, match="input: the image has 75x50 pixels, the limit is 3749"):
        Picture(data, param="input", max_pixels=WIDTH * HEIGHT - 1)


def test_what_pillow_has_decoded_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = Picture(saved(photo()), param="input")
    written(picture, (WIDTH // 2, HEIGHT // 2))
    expected = by_pillow(picture.data)

    def decoded(*_: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(imaging, "plain_jpeg_pixels", decoded)
    monkeypatch.setattr(imaging, "open_image", decoded)
    np.testing.assert_array_equal(written(picture), expected)


def test_a_second_frame_that_is_larger_is_refused() -> None:
    """A file that announces one size to those who read its header, and another to its decoder."""
    data = saved(photo())
    at = data.index(b"\xff\xc0")
    frame = bytearray(data[at : at + 19])
    struct.pack_into(">HH", frame, 5, 8 * HEIGHT, 8 * WIDTH)
    twice = data[: at + 19] + bytes(frame) + data[at + 19 :]
    assert plain_jpeg_size(twice) is None
    with pytest.raises((InvalidInput, UnsupportedMedia)):
        written(Picture(twice, param="input"))


def outcome(data: bytes) -> npt.NDArray[np.uint8] | None:
    try:
        return np.asarray(decode(data, param="input"))
    except RequestError as error:
        assert error.param == "input"
        return None


_SEEDS = [saved(photo(), **options) for options in PLAIN.values()]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=1000, deadline=None)
@given(
    st.sampled_from(_SEEDS),
    st.lists(st.tuples(st.integers(0, 4000), st.binary(min_size=1, max_size=4)), max_size=4),
    st.integers(0, 4000),
)
def test_a_damaged_jpeg_is_read_or_refused_as_by_pillow(
    seed: bytes, changes: list[tuple[int, bytes]], kept: int
) -> None:
    data = bytearray(seed)
    for at, patch in changes:
        data[at % len(data) : at % len(data) + len(patch)] = patch
    damaged = bytes(data[: max(kept, len(data) // 2)])
    expected = outcome(damaged)
    try:
        found = written(Picture(damaged, param="input"))
    except RequestError as error:
        assert error.param == "input"
        assert expected is None
    else:
        assert expected is not None
        np.testing.assert_array_equal(found, expected)


def test_other_forms_of_a_picture_are_its_image() -> None:
    for kind in FORMATS:
        data = encoded(kind)
        np.testing.assert_array_equal(np.asarray(Picture(data, param="x").image), by_pillow(data))
