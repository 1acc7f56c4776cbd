"""The directory of an output: who writes, what the vectors are, and files that are whole or not there.

::

    DIR/tessera.json                        the format, and what all vectors have in common
    DIR/vectors/part-1-of-1-000001.parquet  the table: .parquet or .jsonl files, or else DIR/vectors.lance
    DIR/errors.parquet                      what failed; errors-3-of-16.parquet of one job of several
    DIR/replaced-1/                         an earlier output as it was
    DIR/.locks/                             a file for each shard, and one for what only one may do at a time
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from tessera.errors import ConfigError, OutputFailed
from tessera_corpus.output.row import VectorKind
from tessera_corpus.output.settings import Format
from tessera_corpus.shard import Shard

DESCRIPTION: Final = "tessera.json"
_VERSION: Final = 1


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """``DIR/tessera.json``."""

    version: int = _VERSION
    format: Format
    kind: VectorKind

    @classmethod
    def read(cls, directory: Path) -> Description | None:
        """None where there is none; raises ``ConfigError`` for one that cannot be read."""
        path = directory / DESCRIPTION
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: {error}") from error
        if found.version != _VERSION:
            raise ConfigError(f"{path}: of version {found.version}; this program reads version {_VERSION}")
        return found

    def differences(self, other: Description) -> list[str]:
        formats = [] if self.format == other.format else [f"format {self.format}, not {other.format}"]
        return formats + self.kind.differences(other.kind)


def found(path: Path, wanted: Description, *, replace: bool) -> Description | None:
    """What DIR holds, None where nothing is.

    Raises ``ConfigError`` for what is not ``wanted``, but not where it may be replaced.
    """
    if (there := Description.read(path)) is None:
        for vectors in (path / "vectors", path / "vectors.lance"):
            if vectors.exists() and any(vectors.iterdir()):
                raise ConfigError(
                    f"{vectors} holds files that no {DESCRIPTION} describes; name another --out"
                )
    elif (differences := wanted.differences(there)) and not replace:
        raise ConfigError(
            f"{path} holds other vectors; wanted are {'; '.join(differences)}. Name another --out, "
            "or give --replace, which moves them to a folder below it and does all again"
        )
    return there


class Directory:
    """DIR, to read or, once it is open, for one shard of one run to write; another writer of it is refused.

    Locks are the system's (``flock``), which takes them back from a process that is killed. A shared file
    system has to be mounted so that they hold between machines.
    """

    def __init__(self, path: Path, shard: Shard) -> None:
        self.path = path
        self.shard = shard
        self.vectors = path / "vectors"
        self._name = f"{shard.number}-of-{shard.count}"
        self._locks = path / ".locks"
        self._all = self._own = -1

    def open(self, description: Description, *, replace: bool = False) -> None:
        """To write. Raises ``ConfigError`` where DIR is in use, or holds what ``description`` is not of."""
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
            self._all = _open(self._locks / "all")
            with self.alone():
                self._take()
                self._remove_leftovers()
                self._describe(description, replace)
                if description.format != "lance":
                    self.vectors.mkdir(exist_ok=True)
                _sync(self.path)
        except OSError as error:
            self.close()
            raise ConfigError(f"{self.path}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others write."""
        for descriptor in (self._own, self._all):
            if descriptor >= 0:
                os.close(descriptor)
        self._own = self._all = -1

    def errors(self, ending: str) -> Path:
        return self.path / f"errors{'' if self.shard.count == 1 else f'-{self._name}'}{ending}"

    def part(self, number: int, ending: str) -> Path:
        """The shard's part of this number."""
        return self.vectors / f"part-{self._name}-{number:06}{ending}"

    def next_part(self, ending: str) -> int:
        """A number that no part of the shard has."""
        names = [path.stem for path in self.vectors.glob(f"part-{self._name}-*{ending}")]
        return 1 + max((int(name.rpartition("-")[2]) for name in names), default=0)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While no other shard is here."""
        fcntl.flock(self._all, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._all, fcntl.LOCK_UN)

    def publish(self, path: Path, write: Callable[[Path], object]) -> None:
        """Have a file written and then named ``path``, in place of one that has the name.

        What is killed in between leaves a file of another name, which no reader's glob matches and the next
        run removes. Raises ``OutputFailed``.
        """
        temporary = path.parent / f".{self._name}.tmp"
        try:
            temporary.unlink(missing_ok=True)
            write(temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            temporary.rename(path)
            _sync(path.parent)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise OutputFailed(f"{path}: {error.strerror or error}") from error

    def remove(self, path: Path) -> None:
        """Raises ``OutputFailed``."""
        try:
            path.unlink()
            _sync(path.parent)
        except OSError as error:
            raise OutputFailed(f"{path}: {error.strerror or error}") from error

    def _take(self) -> None:
        self._own = _open(self._locks / self._name)
        if not _locked(self._own):
            raise ConfigError(f"{self.path}: another run writes here (shard {self._name})")
        for path in self._locks.glob("*-of-*"):
            # Shards of another division would have items in common with this one.
            if path.name.rpartition("-")[2] != str(self.shard.count) and self._held(path):
                raise ConfigError(
                    f"{self.path}: a run of shard {path.name} writes here, which may have items in common "
                    f"with shard {self._name}"
                )

    def _held(self, lock: Path) -> bool:
        descriptor = _open(lock)
        try:
            return not _locked(descriptor)
        finally:
            os.close(descriptor)

    def _remove_leftovers(self) -> None:
        for place in (self.path, self.vectors):
            for path in place.glob(".*-of-*.tmp"):
                name = path.name.removeprefix(".").removesuffix(".tmp")
                if name == self._name or not self._held(self._locks / name):
                    path.unlink(missing_ok=True)

    def _describe(self, wanted: Description, replace: bool) -> None:
        if (there := found(self.path, wanted, replace=replace)) is not None:
            if not wanted.differences(there):
                return
            self._set_aside(there)
        self._write(self.path, wanted)

    def _set_aside(self, there: Description) -> None:
        if any(path.name != self._name and self._held(path) for path in self._locks.glob("*-of-*")):
            raise ConfigError(f"{self.path}: other runs write the vectors here that --replace would move")
        number = 1
        while (aside := self.path / f"replaced-{number}").exists():
            number += 1
        aside.mkdir()
        self._write(aside, there)
        for pattern in ("vectors", "vectors.lance", "errors*"):
            for path in self.path.glob(pattern):
                path.rename(aside / path.name)
        _sync(aside)

    def _write(self, directory: Path, description: Description) -> None:
        data = msgspec.json.format(msgspec.json.encode(description), indent=2) + b"\n"
        self.publish(directory / DESCRIPTION, lambda path: path.write_bytes(data))


def _open(path: Path) -> int:
    # For writing too: NFS has no exclusive lock without.
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
