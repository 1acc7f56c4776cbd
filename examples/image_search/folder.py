"""The pictures below a folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from image_search.errors import FolderError

MEDIA_TYPES = {
    ".bmp": "image/bmp",
    ".gif": "image/gif",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".png": "image/png",
    ".tif": "image/tiff",
    ".tiff": "image/tiff",
    ".webp": "image/webp",
}


@dataclass(frozen=True, slots=True)
class File:
    """``size`` in bytes; with ``mtime_ns`` it tells whether a file is the one that was indexed."""

    path: Path
    size: int
    mtime_ns: int


def pictures(folder: Path) -> list[File]:
    """Every picture below ``folder`` by its name, hidden files and folders left out.

    Raises ``FolderError`` when there is no such folder or no picture in it.
    """
    if not folder.is_dir():
        raise FolderError(f"{folder}: no such folder")
    found = sorted(_walk(folder), key=lambda file: file.path)
    if not found:
        raise FolderError(f"{folder}: no picture in it; {', '.join(sorted(MEDIA_TYPES))} are read")
    return found


def _walk(folder: Path) -> Iterator[File]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            if name.startswith(".") or path.suffix.lower() not in MEDIA_TYPES:
                continue
            try:
                status = path.stat()
            except OSError:
                # A link to nowhere, or a file that has just been removed.
                continue
            yield File(path, status.st_size, status.st_mtime_ns)


def media_type(path: Path) -> str:
    """The service looks at the bytes; this is what the data URL says."""
    return MEDIA_TYPES.get(path.suffix.lower(), "application/octet-stream")


def digest(path: Path) -> bytes:
    """What a vector is kept under: equal pictures are embedded once, and a renamed one not again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).digest()


def shown(path: Path) -> str:
    """A path as text that can be printed, whatever bytes it is made of; a terminal gets no commands."""
    text = os.fsencode(path).decode("utf-8", "replace")
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
