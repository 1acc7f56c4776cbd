"""The index: one SQLite file with a vector for each picture's content and model."""

from __future__ import annotations

import heapq
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from image_search.errors import IndexFileError
from image_search.folder import File
from image_search.service import Vector

# "TSSR": tells an index from other databases.
_APPLICATION_ID = 0x54535352
_SCHEMA = f"""
    BEGIN;
    CREATE TABLE vectors (
        digest BLOB NOT NULL, model TEXT NOT NULL, vector BLOB NOT NULL, PRIMARY KEY (digest, model)
    ) WITHOUT ROWID;
    CREATE TABLE files (
        path BLOB PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, digest BLOB NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX files_by_digest ON files (digest);
    PRAGMA application_id = {_APPLICATION_ID};
    COMMIT;
"""
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Hit:
    """``score`` is the cosine, or a reranker's; ``paths`` are the places of this picture, at least one."""

    score: float
    paths: tuple[Path, ...]


class Index:
    """Keeps what is added at once, so that an interrupted run goes on where it stopped.

    A context manager; every method may raise ``IndexFileError``.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        self.path = path
        if not create and not path.exists():
            raise IndexFileError(f"{path}: there is no index yet; make it with the index command")
        with self._errors():
            self._database = sqlite3.connect(path)
        try:
            self._prepare()
        except IndexFileError:
            self._database.close()
            raise

    def _prepare(self) -> None:
        with self._errors():
            (mark,) = self._database.execute("PRAGMA application_id").fetchone()
            (tables,) = self._database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if mark != _APPLICATION_ID and tables:
                raise IndexFileError(f"{self.path}: a database, but no index of this program")
            if not tables:
                self._database.executescript(_SCHEMA)

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def digest_of(self, file: File) -> bytes | None:
        """The content's digest if the file is as it was when it was indexed."""
        with self._errors():
            found = self._database.execute(
                "SELECT digest FROM files WHERE path = ? AND size = ? AND mtime_ns = ?",
                (os.fsencode(file.path), file.size, file.mtime_ns),
            ).fetchone()
        return found and bytes(found[0])

    def has(self, digest: bytes, model: str) -> bool:
        with self._errors():
            found = self._database.execute(
                "SELECT 1 FROM vectors WHERE digest = ? AND model = ?", (digest, model)
            )
            return found.fetchone() is not None

    def add_files(self, digests: Iterable[tuple[File, bytes]]) -> None:
        with self._errors(), self._database:
            self._database.executemany(
                "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)",
                ((os.fsencode(file.path), file.size, file.mtime_ns, digest) for file, digest in digests),
            )

    def add_vectors(self, model: str, rows: Iterable[tuple[bytes, Vector]]) -> None:
        with self._errors(), self._database:
            self._database.executemany(
                "INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)",
                ((digest, model, vector.astype("<f4").tobytes()) for digest, vector in rows),
            )

    def forget_others(self, folder: Path, files: Iterable[File]) -> int:
        """Of what lies below ``folder`` keep ``files`` alone; the number of files forgotten.

        Vectors that no file needs go with them. What lies elsewhere stays: its disk may be away for now.
        """
        kept = {os.fsencode(file.path) for file in files}
        with self._errors(), self._database:
            listed = self._database.execute(
                "SELECT path FROM files WHERE substr(path, 1, ?) = ?", _below(folder)
            ).fetchall()
            gone = [row for row in listed if row[0] not in kept]
            self._database.executemany("DELETE FROM files WHERE path = ?", gone)
            if gone:
                self._database.execute("DELETE FROM vectors WHERE digest NOT IN (SELECT digest FROM files)")
        return len(gone)

    def models(self) -> list[str]:
        with self._errors():
            return [name for (name,) in self._database.execute("SELECT DISTINCT model FROM vectors")]

    def search(self, model: str, query: Vector, folder: Path, top: int) -> list[Hit]:
        """The ``top`` pictures below ``folder`` by cosine, best first; read in chunks, whatever their number.

        Exact. One query reads every vector once, so an approximate index, which would read them all to be
        built, has nothing to gain here.
        """
        order = count()
        best: list[tuple[float, int, bytes]] = []
        for digests, vectors in self._chunks(model, folder, query.nbytes):
            for digest, score in zip(digests, (vectors @ query).tolist(), strict=True):
                entry = (score, -next(order), digest)
                if len(best) < top:
                    heapq.heappush(best, entry)
                elif entry > best[0]:
                    heapq.heapreplace(best, entry)
        return [Hit(score, self._paths(digest, folder)) for score, _, digest in sorted(best, reverse=True)]

    def _chunks(self, model: str, folder: Path, nbytes: int) -> Iterator[tuple[list[bytes], Vector]]:
        with self._errors():
            found = self._database.execute(
                "SELECT digest, vector FROM vectors WHERE model = ? AND digest IN "
                "(SELECT digest FROM files WHERE substr(path, 1, ?) = ?)",
                (model, *_below(folder)),
            )
            while rows := found.fetchmany(_CHUNK):
                if any(len(vector) != nbytes for _, vector in rows):
                    raise IndexFileError(f"{self.path}: holds vectors of another length than the query's")
                joined = b"".join(vector for _, vector in rows)
                yield [digest for digest, _ in rows], np.frombuffer(joined, "<f4").reshape(len(rows), -1)

    def _paths(self, digest: bytes, folder: Path) -> tuple[Path, ...]:
        with self._errors():
            found = self._database.execute(
                "SELECT path FROM files WHERE digest = ? AND substr(path, 1, ?) = ? ORDER BY path",
                (digest, *_below(folder)),
            )
            return tuple(Path(os.fsdecode(path)) for (path,) in found)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise IndexFileError(f"{self.path}: {error}; --index names another file") from error


def _below(folder: Path) -> tuple[int, bytes]:
    """What the paths of files below ``folder`` begin with, and its length."""
    start = os.path.join(os.fsencode(folder), b"")
    return len(start), start
