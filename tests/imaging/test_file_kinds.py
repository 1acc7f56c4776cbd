"""Files that are no pictures of a served format are named."""

from __future__ import annotations

import io
import zipfile

import pytest
from PIL import Image

from tessera.errors import UnsupportedMedia
from tessera.file_kinds import kind_of
from tessera.imaging import Picture


def saved(format: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, format)
    return file.getvalue()


def archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        written.writestr("word/document.xml", "<w/>")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (saved("JPEG2000"), "a JPEG 2000 picture"),
        (b"\xff\x4f\xff\x51\0\x29", "a JPEG 2000 picture"),
        (b"\xff\x0a\xfa\x1f", "a JPEG XL picture"),
        (b"\0\0\0\x0cJXL \r\n\x87\n\0\0\0\x14ftypjxl ", "a JPEG XL picture"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "an SVG drawing"),
        (b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- a -->\n<svg:svg xmlns:svg="x">', "an SVG drawing"),
        (b"<!DOCTYPE html><title>404</title>", "a page of markup"),
        (saved("ICO"), "an icon"),
        (saved("PPM"), "a Netpbm picture"),
        (saved("PDF"), "a PDF file"),
        (archive(), "a ZIP archive"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0", "a video"),
        (bytes(128) + b"DICM", "a DICOM file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a pointer of Git LFS"),
    ],
    # Not of the bytes, in some of which is the time.
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_what_is_no_image_says_what_it_is(data: bytes, kind: str) -> None:
    with pytest.raises(UnsupportedMedia, match=rf"input\[1\] is {kind}.*not read as an image") as raised:
        Picture(data, param="input[1]")
    assert raised.value.param == "input[1]"


@pytest.mark.parametrize("data", [b"", b"P", b"hello", bytes(200), b"<a>", b"\x89PNG"])
def test_what_nobody_knows_is_no_image(data: bytes) -> None:
    assert kind_of(data) is None
    with pytest.raises(UnsupportedMedia, match="no image of a served format"):
        Picture(data, param="x")
