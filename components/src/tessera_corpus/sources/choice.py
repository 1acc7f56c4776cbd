"""What the words of a command line name."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from tessera.errors import ConfigError
from tessera_corpus.item import Failure, Row, Source, file_of
from tessera_corpus.shard import Shard
from tessera_corpus.sources.chain import Chain
from tessera_corpus.sources.counted import Counted
from tessera_corpus.sources.folder import FILES, Folder, Unreadable, printable, read_file, rows_of
from tessera_corpus.sources.lines import Honoured, Lines
from tessera_corpus.sources.media import Media
from tessera_corpus.sources.passed import remedies
from tessera_corpus.sources.settings import ReadSettings, SourceSettings
from tessera_corpus.sources.table import Table
from tessera_corpus.sources.tables import LANCE, LINES, TABLES, Tables, tables_below

STANDARD_INPUT: Final = "-"

_MAGIC: Final = re.compile(r"[*?\[]")


def open_source(words: Sequence[str], settings: SourceSettings, honoured: Honoured) -> Source:
    """The sources one after another. Where there are several, ids of files are paths as they were given.

    Raises ``ConfigError`` for what is not there, and for a file of an unknown kind.
    """
    if words.count(STANDARD_INPUT) > 1:
        raise ConfigError("standard input, -, can be read once")
    root = settings.root
    if root is not None and not root.is_dir():
        raise ConfigError(f"--root {root}: no such directory")
    media = Media(root, settings.media, settings.max_bytes)
    alone = len(words) == 1
    sources = [_source(word, settings, media, honoured, alone=alone) for word in words]
    return sources[0] if alone else Chain(sources)


def read_again(source: str, id: str, settings: ReadSettings, media: Media) -> Iterator[Row]:
    """What is at the place that a row says it was read from: a file, a line, or a row of a table.

    A file has the ``id`` then. Raises ``ConfigError`` for a place that is not there.
    """
    name, _, number = source.rpartition(":")
    path, everything = Path(name), Shard()
    ending = path.suffix.lower()
    if number.isdecimal() and ending in LINES:
        most = settings.max_line_bytes
        lines = Lines(name=name, path=path, media=media, honoured=None, max_bytes=most, shard=everything)
        yield from lines.at(int(number))
    elif number.isdecimal() and ending in TABLES:
        table = Table(path=path, columns=settings.columns, media=media, shard=everything)
        yield from table.at(int(number))
    elif Path(source).suffix.lower() in FILES:
        yield from File(path=Path(source), id=id, max_bytes=settings.max_bytes, shard=everything).rows()
    else:
        raise ConfigError(f"{source}: cannot be read again")


def _source(word: str, settings: SourceSettings, media: Media, honoured: Honoured, *, alone: bool) -> Source:
    path, shard, most = Path(word), settings.shard, settings.max_bytes
    ending = path.suffix.lower()
    if word == STANDARD_INPUT or (ending in LINES and path.is_file()):
        return Lines(
            name="standard input" if word == STANDARD_INPUT else printable(word),
            path=None if word == STANDARD_INPUT else path,
            media=media,
            honoured=honoured,
            max_bytes=settings.max_line_bytes,
            shard=shard,
        )
    if path.is_dir() and ending != LANCE and (below := tables_below(path)) is not None:
        sources = [_source(str(each), settings, media, honoured, alone=False) for each in below.paths]
        return Tables(sources, root=path, shard=shard, others=below.others)
    if ending in TABLES and path.exists():
        return Table(path=path, columns=settings.columns, media=media, shard=shard, alone=alone)
    if path.is_dir():
        return Folder(root=path, max_bytes=most, shard=shard, prefix="" if alone else f"{path}/")
    if path.is_file():
        if ending not in FILES:
            kinds = ", ".join(sorted(FILES | LINES | TABLES))
            remedy = remedies([ending])
            raise ConfigError(f"{word}: its ending is none of those that are read: {kinds}{remedy}")
        return File(path=path, id=printable(path.name if alone else str(path)), max_bytes=most, shard=shard)
    if (magic := _MAGIC.search(word)) is not None:
        top, _, pattern = word[: magic.start()].rpartition("/")
        pattern += word[magic.start() :]
        root = Path(top or ("/" if word.startswith("/") else "."))
        if not root.is_dir():
            raise ConfigError(f"{word}: there is no directory {root}")
        if ending in LINES | TABLES:
            # As if a shell had replaced it.
            paths = sorted(glob.glob(word, recursive=True))
            if not paths:
                raise ConfigError(f"{word}: there is no such file")
            return Chain([_source(path, settings, media, honoured, alone=False) for path in paths])
        prefix = "" if alone or not top else f"{top}/"
        return Folder(root=root, max_bytes=most, shard=shard, prefix=prefix, pattern=glob_pattern(pattern))
    raise ConfigError(f"{word}: no such file or directory")


def glob_pattern(text: str) -> re.Pattern[str]:
    """A glob as a shell's with ``globstar``: ``**`` stands for any folders, ``*`` and ``?`` for no slash."""
    found = []
    for part in PurePosixPath(text).parts:
        if part == "**":
            found.append("(?:[^/]+/)*")
            continue
        written = ""
        for token in re.findall(r"\[!?\]?[^\]]*\]|.", part, re.DOTALL):
            if token == "*":
                written += "[^/]*"
            elif token == "?":
                written += "[^/]"
            elif len(token) > 1:
                inner = re.sub(r"([\[\\&~|])", r"\\\1", token[1:-1])
                written += f"[^{inner[1:]}]" if inner.startswith("!") else f"[{inner}]"
            else:
                written += re.escape(token)
        found.append(f"{written}/")
    try:
        return re.compile("".join(found).removesuffix("/") + ("[^/]*" if text.endswith("**") else ""))
    except re.error as error:
        raise ConfigError(f"{text}: not a glob: {error}") from None


@dataclass(slots=True, kw_only=True)
class File(Counted):
    """One picture, PDF or text file, which may be a link: whoever gave the command named it."""

    path: Path
    id: str
    max_bytes: int
    shard: Shard
    _most: int = 1

    def rows(self) -> Iterator[Row]:
        if self.shard.holds(self.id):
            source = printable(str(self.path))
            try:
                descriptor = os.open(self.path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    data = read_file(self.path.resolve().name, descriptor, self.max_bytes)
                finally:
                    os.close(descriptor)
                yield from rows_of(self.id, source, data, self.path.name)
            except Unreadable as error:
                yield Failure(id=self.id, source=source, reason=str(error))
            except OSError as error:
                yield Failure(id=self.id, source=source, reason=error.strerror or type(error).__name__)
        self._read = 1

    def gives(self, id: str, place: str, page: int | None) -> bool:
        return (
            file_of(id, page) == self.id and place == printable(str(self.path)) and self.shard.holds(self.id)
        )
