"""Files of every mode, depth and oddity through a confined decoder, as they are and beside ImageMagick."""

from __future__ import annotations

import io
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tessera import heif
from tessera.errors import InvalidInput, RequestError, UnsupportedMedia
from tessera.imaging import Picture, open_image
from tessera.tiff import cut, pages
from tessera_corpus.results.thumbnail import Thumbnails
from tests.imaging.kinds import kinds, of_samples, ramp, tiff, upright
from tests.imaging.test_picture import photo, saved

KINDS = kinds()
MAGICK = next(filter(None, map(shutil.which, ("magick", "convert-im6.q16"))), None)
ENDINGS = {"PNG": "png", "GIF": "gif", "WebP": "webp", "BMP": "bmp", "JPEG": "jpg"}


@pytest.fixture(scope="module")
def decoder() -> Iterator[Thumbnails]:
    """A confined process, which can import nothing any more."""
    found = Thumbnails()
    yield found
    found.close()


def test_names_are_of_one_kind_each() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) > 400


def test_each_kind_is_shown_as_it_is_meant(decoder: Thumbnails) -> None:
    wrong = []
    for kind in KINDS:
        found = decoder.make(kind.data, source=kind.name)
        if kind.shows is None:
            wrong += [] if isinstance(found, str) else [f"{kind.name}: read"]
        elif isinstance(found, str):
            wrong.append(f"{kind.name}: {found}")
        elif found.size != kind.shows.shape[1::-1]:
            wrong.append(f"{kind.name}: {found.size}")
        else:
            apart = np.abs(np.asarray(found).astype(int) - kind.shows).max()
            wrong += [f"{kind.name}: {apart} apart"] if apart > kind.apart else []
    assert not wrong


@pytest.mark.skipif(MAGICK is None, reason="needs imagemagick, see scripts/system-packages")
def test_what_files_show_is_what_imagemagick_shows(tmp_path: Path) -> None:
    assert MAGICK is not None
    asked = [kind for kind in KINDS if kind.shows is not None and kind.elsewhere]
    words = [MAGICK]
    for number, kind in enumerate(asked):
        path = tmp_path / f"{number}.{ENDINGS.get(kind.name.split()[0], 'tif')}"
        path.write_bytes(kind.data)
        words += ["(", f"{path}[0]", "-background", "white", "-flatten", "-auto-orient", "-type", "TrueColor"]
        words += ["-depth", "8", "-write", f"ppm:{tmp_path}/{number}.ppm", "+delete", ")"]
    ran = subprocess.run(
        [*words, "xc:white", "null:"], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    wrong = []
    for number, kind in enumerate(asked):
        with Image.open(tmp_path / f"{number}.ppm") as image:
            found = np.asarray(image.convert("RGB")).astype(int)
        assert kind.shows is not None
        if found.shape != kind.shows.shape or np.abs(found - kind.shows).mean() > 3:
            wrong.append(kind.name)
    assert len(asked) > 300 and not wrong


def several(*values: int, big: bool = False, marks: tuple[int, ...] = ()) -> bytes:
    """A TIFF of pages of one grey each."""
    directories, strips = [], []
    for number, value in enumerate(values):
        tags = {256: (4, [8]), 257: (4, [6]), 258: (3, [8]), 262: (3, [1]), 277: (3, [1]), 278: (4, [3])}
        if number < len(marks):
            tags[254] = (4, [marks[number]])
        directories.append(tags)
        strips.append([bytes([value]) * 24] * 2)
    return tiff(*directories, strips=strips, big=big)


@pytest.mark.parametrize("big", [False, True])
def test_pages_of_a_tiff_are_files_of_their_own(big: bool) -> None:
    found = [Picture(cut(page), param="x").image for page in pages(several(10, 20, 30, big=big))]
    assert [image.getpixel((3, 4)) for image in found] == [(value,) * 3 for value in (10, 20, 30)]


def test_pages_as_pillow_writes_them() -> None:
    pictures = [photo(40, 30), photo(64, 20), photo(20, 50).convert("L"), photo(30, 30).convert("1")]
    for compression in ("raw", "tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits"):
        some = pictures[:2] if compression == "jpeg" else pictures
        data = saved(some[0], "TIFF", save_all=True, append_images=some[1:], compression=compression)
        found = [Picture(cut(page), param="x").image for page in pages(data)]
        assert [image.size for image in found] == [picture.size for picture in some]
        for image, picture in zip(found, some, strict=True):
            difference = np.asarray(image).astype(int) - np.asarray(picture.convert("RGB"))
            assert np.abs(difference).mean() < (6 if compression == "jpeg" else 0.1)


def test_several_pages_are_no_image_and_a_thumbnail_is_no_page() -> None:
    with pytest.raises(InvalidInput, match=r"input\[0\] is a TIFF file of several pages") as raised:
        Picture(several(10, 20), param="input[0]")
    assert raised.value.param == "input[0]"
    for marks, value in (((0, 1), 10), ((1, 0), 20), ((4, 0, 1), 20), ((1, 1), 10)):
        data = several(*(10, 20, 30)[: len(marks)], marks=marks)
        assert Picture(data, param="x").image.getpixel((0, 0)) == (value,) * 3


def test_a_page_of_old_jpeg_is_followed_by_none() -> None:
    """What it needs lies anywhere, so the whole file goes with it, but for the way to the next page."""
    data = several(10, 20, 30)
    found = []
    for page in pages(data):
        del page.entries[279]
        found.append(cut(page))
    assert len(found) == 3 and all(len(list(pages(file))) == 1 for file in found)


def test_chains_without_an_end_are_read_to_where_they_turn_back() -> None:
    data = bytearray(several(10, 20))
    first = int.from_bytes(data[4:8], "little")
    data[-4:] = first.to_bytes(4, "little")
    assert len(list(pages(bytes(data)))) == 2
    data[-4:] = (1 << 31).to_bytes(4, "little")
    assert len(list(pages(bytes(data)))) == 2
    for end in range(len(data)):
        for page in pages(bytes(data[:end])):
            try:
                cut(page)
            except ValueError:
                continue
    assert not list(pages(b"GIF89a")) and not list(pages(b"II*\0"))


def test_a_page_whose_parts_are_larger_than_the_file_is_not_cut_out() -> None:
    tags = {256: (4, [8]), 257: (4, [80]), 258: (3, [8]), 262: (3, [1]), 277: (3, [1]), 278: (4, [1])}
    data = bytearray(tiff(tags, strips=[[bytes(8)] * 80]))
    (page,) = pages(bytes(data))
    _, count, place = page.entries[279]
    for at in range(count):
        data[place + 4 * at : place + 4 * at + 4] = len(data).to_bytes(4, "little")
    (page,) = pages(bytes(data))
    with pytest.raises(ValueError, match="larger than the file"):
        cut(page)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (of_samples(ramp(1, 16), 16, 1, more={339: (3, [2])}), "signed samples"),
        (of_samples(ramp(1, 8), 8, 1, more={339: (3, [3])}), "floating-point samples"),
        (b"II+\0\x08\0\0\0" + bytes(20), "BigTIFF"),
        (of_samples(ramp(3, 8), 8, 9), "photometric interpretation 9"),
        (of_samples(ramp(3, 8), 8, 2, more={259: (3, [34712])}), "compression 34712"),
    ],
    ids=["signed", "float", "BigTIFF", "ICCLab", "JPEG 2000"],
)
def test_a_refused_tiff_says_what_it_is(data: bytes, said: str) -> None:
    with pytest.raises(UnsupportedMedia, match=said) as raised:
        Picture(data, param="input[2]")
    assert raised.value.message.startswith("input[2] is a ") and raised.value.param == "input[2]"


def test_samples_that_are_not_there_are_damage() -> None:
    data = of_samples(ramp(3, 16), 16, 2, planes=True)
    for end in range(8, len(data) - 4, 7):
        with pytest.raises(RequestError):
            _ = Picture(data[:end], param="x").image
    seeds = [kind.data for kind in KINDS if "planes" in kind.name or "grey and" in kind.name][::9]
    random = np.random.default_rng(1)
    for number in range(400):
        changed = bytearray(seeds[number % len(seeds)])
        for _ in range(3):
            changed[random.integers(len(changed))] = random.integers(256)
        try:
            picture = Picture(bytes(changed), param="x", max_pixels=1 << 20)
            assert picture.image.size == picture.size
        except RequestError as error:
            assert error.param == "x"


def test_a_program_s_image_keeps_what_it_was() -> None:
    from tessera.imaging import bitmap

    kind = next(kind for kind in KINDS if kind.name == "PNG 0 4 tRNS")
    with open_image(kind.data, param="x") as image:
        before = image.info["transparency"]
        found = Picture(bitmap(image, param="x"), param="x").image
        assert image.info["transparency"] == before
    assert kind.shows is not None
    np.testing.assert_array_equal(np.asarray(found), kind.shows)


def test_a_later_frame_of_a_program_s_animation_lies_on_those_before() -> None:
    from tessera.imaging import bitmap

    frames = [Image.new("RGB", (20, 10), (200, 30, 60)) for _ in range(2)]
    frames[1].paste((0, 0, 0), (5, 5, 8, 8))
    with Image.open(io.BytesIO(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))) as image:
        image.seek(1)
        found = Picture(bitmap(image, param="x"), param="x").image
    assert np.abs(np.asarray(found).astype(int) - np.asarray(frames[1])).max() < 8


def of_phone(kind: str, turn: int = 1, mode: str = "RGB") -> tuple[bytes, np.ndarray]:
    """A file with a turn in its boxes, and what was put into it."""
    picture = photo(96, 64).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = turn
    picture.info["exif"] = exif.tobytes()
    options = {"exif": exif} if kind == "AVIF" else {}
    return saved(picture, kind, quality=95, **options), upright(np.asarray(picture.convert("RGB")), turn)


@pytest.fixture(params=["AVIF", "HEIF"])
def phone(request: pytest.FixtureRequest) -> str:
    if request.param == "HEIF":
        pytest.importorskip("pillow_heif", reason="needs pillow-heif")
        heif.load_codecs()
    return str(request.param)


def test_pictures_of_phones_are_decoded_confined_and_upright(phone: str, decoder: Thumbnails) -> None:
    for turn in range(1, 9):
        data, shows = of_phone(phone, turn)
        assert heif.format_of(data) == phone
        assert Picture(data, param="x").size == shows.shape[1::-1]
        found = decoder.make(data, source="x")
        assert isinstance(found, Image.Image), found
        assert found.size == shows.shape[1::-1]
        assert np.abs(np.asarray(found).astype(int) - shows).mean() < 12
    clear = Image.new("RGBA", (64, 64), (200, 30, 60, 0))
    found = decoder.make(saved(clear, phone), source="x")
    assert isinstance(found, Image.Image) and found.getpixel((30, 30)) == (255, 255, 255)


def test_an_orientation_that_only_xmp_has_turns_nothing() -> None:
    picture = photo(96, 64)
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/" tiff:Orientation="6"/>'
    found = Picture(saved(picture, "AVIF", quality=95, xmp=xmp), param="x").image
    assert found.size == picture.size
    assert np.abs(np.asarray(found).astype(int) - np.asarray(picture)).mean() < 6


def test_a_sequence_without_a_picture_beside_it_is_its_first_frame() -> None:
    pictures = [photo(96, 64), photo(96, 64).transpose(Image.Transpose.ROTATE_180)]
    data = saved(pictures[0], "AVIF", quality=95, save_all=True, append_images=pictures[1:])
    # The picture beside the frames is called something else, so that nobody finds it.
    data = data.replace(b"pitm", b"free", 1)
    assert Picture(data, param="x").size == (96, 64)


def test_no_library_opens_such_a_file_before_a_decoder(phone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, shows = of_phone(phone, 6)

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr(Image, "open", opened)
    assert Picture(data, param="x").size == shows.shape[1::-1]


@pytest.mark.filterwarnings("ignore")
def test_damaged_files_of_phones_are_read_or_refused(phone: str) -> None:
    data, _ = of_phone(phone)
    for end in range(0, len(data), max(1, len(data) // 200)):
        with pytest.raises(RequestError):
            _ = Picture(data[:end], param="x").image
    random = np.random.default_rng(2)
    for _ in range(300):
        changed = bytearray(data)
        changed[random.integers(400)] = random.integers(256)
        try:
            picture = Picture(bytes(changed), param="x", max_pixels=1 << 16)
            assert picture.image.size == picture.size
        except RequestError as error:
            assert error.param == "x"


def test_what_is_missing_for_a_heic_file_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heif, "absent", lambda *names: names)
    with pytest.raises(UnsupportedMedia, match=r"input\[1\] is a HEIC file, which needs pillow-heif"):
        Picture(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", param="input[1]")
