"""Inputs in every form a program has them, and what is none."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tessera.errors import InvalidInput, MediaFetchError
from tessera.imaging import decode
from tessera.local.content import ImageFile, ImageURL
from tessera.local.groups import size_of, take
from tessera.local.inputs import read_input, read_inputs
from tessera.models.base import Role


def file_of(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


PICTURE = file_of(Image.new("RGB", (8, 6), "teal"), "PNG")


def parts(value: Any) -> tuple[object, ...]:
    return read_input(value, "input[0]", Role.NONE, None).parts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a picture.png"
    path.write_bytes(PICTURE)
    return path


def test_texts_and_images_come_alone_and_together(path: Path) -> None:
    image, url = ImageFile(PICTURE), "https://example.com/a.png"
    assert parts("https://example.com/a.png") == (url,)
    assert (
        parts(path) == parts(PICTURE) == parts(bytearray(PICTURE)) == parts({"image": str(path)}) == (image,)
    )
    assert parts({"image": f"file://{path.parent}/a%20picture.png"}) == (image,)
    assert parts({"image": url}) == (ImageURL(url),)
    assert parts({"text": "a caption", "image": path}) == (image, "a caption")
    assert parts({"text": "a text", "image": None}) == ("a text",)
    assert parts(["before", path, {"image": url}, "after"]) == ("before", image, ImageURL(url), "after")
    assert type(parts(np.array(["a text"])[0])[0]) is str


def test_inputs_are_read_as_they_are_taken_and_named() -> None:
    rows = read_inputs(iter(["a", 3]), "documents", Role.PASSAGE, None)  # type: ignore[list-item]
    first = next(rows)
    assert (first.param, first.role) == ("documents[0]", Role.PASSAGE)
    with pytest.raises(InvalidInput, match=r"^documents\[1\]: expected a text, an image.* found 3$"):
        next(rows)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", r"^input\[0\]: expected a text or an image, found an empty string$"),
        ([], r"^input\[0\]: expected a text or an image, found an empty list$"),
        ({}, r"^input\[0\]: expected a text or an image, found an empty object$"),
        (None, r"^input\[0\]: expected a text, an image, .* found null$"),
        (["a", ["b"]], r"^input\[0\]: expected a text, an image, .* found a list of 1$"),
        ({"text": b"a"}, r"^input\[0\]: expected text, found a bytes$"),
        ({"image": 3}, r"^input\[0\]: expected an image: .* found 3$"),
        ({"img": "a"}, r"^input\[0\].img: unknown key; did you mean image\?"),
        ("\ud800", r"^input\[0\]: half of a surrogate pair stands in the text$"),
    ],
)
def test_what_is_no_input_is_refused_by_its_name(value: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        parts(value)
    assert caught.value.param is not None and caught.value.param.startswith("input[0]")


@pytest.mark.parametrize("value", ["a text", b"file", Path("a.png"), {"text": "a"}, 3, None])
def test_a_single_input_is_no_list(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^input: expected a list of inputs"):
        next(read_inputs(value, "input", Role.NONE, None))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MediaFetchError, match=r"^input\[0\]: .*nowhere cannot be read: No such file"):
        parts(tmp_path / "nowhere")
    with pytest.raises(MediaFetchError, match=r"Is a directory"):
        parts({"image": str(tmp_path)})


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P", "L", "1", "I;16", "CMYK"])
def test_pixels_are_those_of_the_file(mode: str) -> None:
    values = np.random.default_rng(3).integers(0, 256, (6, 8, 4), np.uint8)
    image = Image.fromarray(values, "RGBA")
    if mode == "I;16":
        image = Image.fromarray(values[..., 0].astype(np.uint16) * 200)
    elif mode != "RGBA":
        image = image.convert("RGB").convert(mode) if mode != "LA" else image.convert("LA")
    (part,) = parts(image)
    assert isinstance(part, ImageFile)
    form = "TIFF" if mode == "CMYK" else "PNG"
    expected = decode(file_of(image, form), param="file")
    np.testing.assert_array_equal(decode(part.data, param="bitmap"), expected)


def test_an_image_that_was_opened_is_turned_as_its_file_and_a_made_one_is_not() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(np.random.default_rng(3).integers(0, 256, (6, 8, 3), np.uint8))
    data = file_of(image, "PNG", exif=exif)
    opened = Image.open(io.BytesIO(data))
    (part,), (computed,) = parts(opened), parts(opened.convert("RGB"))
    assert isinstance(part, ImageFile) and isinstance(computed, ImageFile)
    assert decode(part.data, param="opened").size == (6, 8)
    np.testing.assert_array_equal(decode(part.data, param="opened"), decode(data, param="file"))
    np.testing.assert_array_equal(decode(computed.data, param="made"), image)
    with pytest.raises(InvalidInput, match=r"^input\[0\] is a damaged image"):
        parts(Image.open(io.BytesIO(data[:-30])))


def test_a_call_takes_short_texts_or_few_pictures() -> None:
    rows = iter([("a",)] * 100)
    assert [len(take(rows, size_of)[0]) for _ in range(3)] == [64, 36, 0]
    pictures = iter([(ImageFile(PICTURE),)] * 6)
    taken, (weight, nbytes) = take(pictures, size_of)
    assert (len(taken), weight, nbytes) == (4, 64, 4 * len(PICTURE))
    assert len(take(iter([("a" * 256 * 64,), ("b",)]), size_of)[0]) == 1
