"""What a file is that no picture decoder here reads, by its first bytes, in words for whoever sent it."""

from __future__ import annotations

import re
from typing import Final

# Beginnings, from the registrations and specifications of the formats.
_BEGINNINGS: Final = (
    (b"\xff\x0a", "a JPEG XL picture"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "a JPEG XL picture"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "a JPEG 2000 picture"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 picture"),
    (b"8BPS", "a Photoshop document"),
    (b"\0\0\x01\0", "an icon"),
    (b"v/1\x01", "an OpenEXR picture"),
    (b"qoif", "a QOI picture"),
    (b"#?RADIANCE", "a Radiance picture"),
    (b"DDS ", "a DirectDraw surface"),
    (b"II\xbc\x01", "a JPEG XR picture"),
    (b"IIRO", "a raw picture of a camera"),
    (b"IIU\0", "a raw picture of a camera"),
    (b"FUJIFILMCCD-RAW", "a raw picture of a camera"),
    (b"%PDF-", "a PDF file"),
    (b"%!PS", "a PostScript file"),
    (b"PK\x03\x04", "a ZIP archive, as office files are"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an office file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x1aE\xdf\xa3", "a video"),
    (b"ftypcrx", "a raw picture of a camera"),
    (b"ftypqt", "a video"),
    (b"ftypisom", "a video"),
    (b"ftypmp4", "a video"),
    (b"DICM", "a DICOM file"),
    (b"version https://git-lfs", "a pointer of Git LFS, whose file was not fetched"),
)
# Those that do not stand at the beginning.
_PLACES: Final = {b"ftyp": 4, b"DICM": 128}
_NETPBM: Final = re.compile(rb"P[1-7]\s")
_MARKUP: Final = re.compile(rb"\s*(?:<\?xml|<!doctype|<!--|<svg|<html|<head)", re.IGNORECASE)
_SVG: Final = re.compile(rb"<(?:\w+:)?svg[\s>]", re.IGNORECASE)
_LOOKED_AT: Final = 4096


def kind_of(data: bytes) -> str | None:
    """Return what a file is, with its article; None for what nothing here knows."""
    start = data[:_LOOKED_AT]
    for beginning, kind in _BEGINNINGS:
        if start.startswith(beginning, _PLACES.get(beginning[:4], 0)):
            return kind
    if _NETPBM.match(start):
        return "a Netpbm picture"
    start = start.removeprefix(b"\xef\xbb\xbf")
    if _MARKUP.match(start):
        return "an SVG drawing" if _SVG.search(start) else "a page of markup, as HTML is"
    return None
