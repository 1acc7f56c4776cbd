"""A folder of pictures, texts and documents."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final

from tessera.errors import ConfigError
from tessera_corpus.item import Document, Failure, Item, Row, file_of
from tessera_corpus.shard import Shard
from tessera_corpus.sources.ahead import Work, ahead
from tessera_corpus.sources.counted import Counted
from tessera_corpus.sources.pictures import picture_rows

PICTURES: Final = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
        *(".avif", ".heic", ".heif", ".hif"),
    )
)
TEXTS: Final = frozenset({".txt", ".md"})
DOCUMENTS: Final = frozenset({".pdf"})
FILES: Final = PICTURES | TEXTS | DOCUMENTS

# Kinds of what is passed over that are no endings.
LINK: Final = "links"
HIDDEN: Final = "hidden"
NO_ENDING: Final = "without an ending"

# A walk holds one descriptor open for each level, and processes may have 1,024.
_MAX_DEPTH: Final = 100


class Unreadable(Exception):
    """Why one file is no item."""


@dataclass(slots=True, kw_only=True)
class Folder(Counted):
    """The files below ``root``, each an item with its path below ``root``, behind ``prefix``, as the id.

    With ``pattern`` those alone whose path below ``root`` it matches. The ending of a name says what a file
    is; files with other endings, and names that begin with a dot, are passed over. Links are, too, for who
    wrote the folder could reach any file of this machine by them. A file of more than ``max_bytes`` is not
    read. Files of a folder come before its folders, both in the order of their names' bytes.
    """

    root: Path
    max_bytes: int
    shard: Shard = field(default_factory=Shard)
    prefix: str = ""
    pattern: re.Pattern[str] | None = None
    _passed: Counter[str] = field(default_factory=Counter)

    def passed_over(self) -> Mapping[str, int]:
        return self._passed

    def gives(self, id: str, place: str, page: int | None) -> bool:
        above = printable(str(self.root / "_"))[:-1]
        path = place.removeprefix(above)
        if not place.startswith(above) or (self.pattern is not None and not self.pattern.fullmatch(path)):
            return False
        name = file_of(id, page)
        if name != printable(self.prefix) + path or not self.shard.holds(name):
            return False
        # A folder with nothing in it may be one that is not mounted.
        try:
            with os.scandir(self.root) as entries:
                return any(True for _ in entries)
        except OSError:
            return False

    def rows(self) -> Iterator[Row]:
        """Raises ``ConfigError`` where ``root`` cannot be read, or a folder goes away in the meantime."""
        try:
            os.scandir(self.root).close()
        except OSError as error:
            raise ConfigError(f"{self.root}: {error.strerror}") from None
        threading.Thread(target=self._count, name="count", daemon=True).start()
        yield from ahead(self._works())
        self._most = self._read

    def _count(self) -> None:
        """How many files there are, which nothing waits for."""
        found = 0
        for above, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            below = PurePosixPath(os.path.relpath(above, self.root))
            found += sum(self._wanted(str(below / name), name) for name in files)
        self._most = max(found, self._read)

    def _wanted(self, path: str, name: str) -> bool:
        if name.startswith(".") or os.path.splitext(name)[1].lower() not in FILES:
            return False
        return self.pattern is None or self.pattern.fullmatch(path) is not None

    def _works(self) -> Iterator[Work]:
        for above, folders, files, directory in os.fwalk(self.root, onerror=_raise):
            below = PurePosixPath(os.path.relpath(above, self.root))
            entered = []
            for name in sorted(folders, key=os.fsencode):
                if name.startswith("."):
                    self._pass_over(str(below / name), HIDDEN)
                    continue
                if _is_link(name, directory):
                    self._pass_over(str(below / name), LINK)
                    continue
                if (reason := _closed(name, directory, len(below.parts))) is None:
                    entered.append(name)
                elif self.pattern is None:
                    yield partial(self._failure, str(below / name), reason)
            folders[:] = entered
            for name in sorted(files, key=os.fsencode):
                path = str(below / name)
                if (kind := self._passed_kind(name, directory)) is not None:
                    self._pass_over(path, kind)
                elif self._wanted(path, name):
                    self._read += 1
                    if self.shard.holds(self._id(path)):
                        # Of its own: it is read when this walk is elsewhere.
                        yield partial(self._file, path, name, os.dup(directory))

    def _passed_kind(self, name: str, directory: int) -> str | None:
        """The kind of a file that is no source by its name; None for one that may be."""
        if name.startswith("."):
            return HIDDEN
        if _is_link(name, directory):
            return LINK
        ending = os.path.splitext(name)[1].lower()
        return None if ending in FILES else printable(ending) or NO_ENDING

    def _pass_over(self, path: str, kind: str) -> None:
        """Count what is of this shard, and of the pattern."""
        if self.pattern is not None and self.pattern.fullmatch(path) is None:
            return
        if self.shard.holds(self._id(path)):
            self._passed[kind] += 1

    def _id(self, path: str) -> str:
        return printable(f"{self.prefix}{path}")

    def _file(self, path: str, name: str, directory: int) -> list[Row]:
        try:
            return self._items(path, name, directory)
        except Unreadable as error:
            return self._failure(path, str(error))
        finally:
            os.close(directory)

    def _items(self, path: str, name: str, directory: int) -> list[Row]:
        try:
            path.encode()
        except UnicodeEncodeError:
            raise Unreadable("the name is not UTF-8") from None
        data = read_file(name, directory, self.max_bytes)
        return rows_of(self._id(path), printable(str(self.root / path)), data, name)

    def _failure(self, path: str, reason: str) -> list[Row]:
        id = self._id(path)
        source = printable(str(self.root / path))
        return [Failure(id=id, source=source, reason=reason)] if self.shard.holds(id) else []


def rows_of(id: str, source: str, data: bytes, name: str) -> list[Row]:
    """A file as what its ending says; raises ``Unreadable`` for a text that is none."""
    ending = os.path.splitext(name)[1].lower()
    if ending in DOCUMENTS:
        return [Document(id=id, source=source, data=data)]
    if ending in PICTURES:
        return picture_rows(id, source, data)
    return [Item(id=id, source=source, parts=(_text(data),))]


def _closed(name: str, directory: int, depth: int) -> str | None:
    """Why a folder is not entered."""
    if depth >= _MAX_DEPTH:
        return f"deeper than {_MAX_DEPTH} folders"
    try:
        os.close(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory))
    except OSError as error:
        return error.strerror
    return None


def _raise(error: OSError) -> None:
    raise ConfigError(f"a folder changed while it was read: {error}")


def read_file(name: str, directory: int, max_bytes: int) -> bytes:
    # Without waiting: to open a named pipe would wait for who writes to it.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        if _is_link(name, directory):
            raise Unreadable("a link")
        with open(os.open(name, flags, dir_fd=directory), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Unreadable("not a regular file")
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise Unreadable(error.strerror or type(error).__name__) from None
    if len(data) > max_bytes:
        raise Unreadable(f"more than {max_bytes} bytes")
    if not data:
        raise Unreadable("empty")
    return data


def _text(data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8 from byte {error.start} on") from None
    if "\0" in text:
        raise Unreadable("not UTF-8: it has zero bytes, as UTF-16 has")
    if not text.strip():
        raise Unreadable("empty")
    return text


def _is_link(name: str, directory: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except OSError:
        return False


def printable(path: str) -> str:
    """A path as a table can hold it: bytes that are no UTF-8 stand as ``\\xff``."""
    return os.fsencode(path).decode(errors="backslashreplace")
