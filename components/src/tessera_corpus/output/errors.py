"""What failed, as a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tessera.errors import ConfigError
from tessera_corpus.item import DUPLICATE, Failure, Origin
from tessera_corpus.output.directory import Directory

_COLUMNS: Final = ("id", "page", "source", "reason")


class ErrorTable:
    """The failures of a shard's last try of each item, and the items of an id more than the first.

    They are published as a whole.
    """

    def __init__(
        self,
        directory: Directory,
        ending: str,
        read: Callable[[Path], list[Failure]],
        write: Callable[[Path, Sequence[Failure]], None],
    ) -> None:
        """Raises ``ConfigError`` for a file that cannot be read."""
        self.path: Final = directory.errors(ending)
        self._directory = directory
        self._write = write
        try:
            failures = read(self.path) if self.path.exists() else []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.path}: not a file of errors that can be read: {error}") from error
        self._failures = {failure.id: failure for failure in failures if failure.reason != DUPLICATE}
        # The item that was first has its vector: these stay as long as they are there.
        self._duplicates = {_line(failure): failure for failure in failures if failure.reason == DUPLICATE}
        self._added: set[tuple[str, str]] = set()
        self._changed = False

    def add(self, failure: Failure) -> None:
        if failure.reason == DUPLICATE:
            self._duplicates[_line(failure)] = failure
        else:
            self._failures[failure.id] = failure
        self._added.add(_line(failure))
        self._changed = True

    def forget(self, id: str) -> None:
        """It has its vector now."""
        if self._failures.pop(id, None) is not None:
            self._changed = True

    def forget_gone(self, gone: Callable[[Origin], bool]) -> None:
        """Forget earlier failures of what is not there any more."""

        def left(failure: Failure) -> bool:
            return _line(failure) in self._added or not gone(failure)

        before = len(self._failures) + len(self._duplicates)
        self._failures = {key: failure for key, failure in self._failures.items() if left(failure)}
        self._duplicates = {key: failure for key, failure in self._duplicates.items() if left(failure)}
        self._changed |= len(self._failures) + len(self._duplicates) < before

    def publish(self) -> None:
        """Raises ``OutputFailed``."""
        if not self._changed:
            return
        self._changed = False
        # At once: another thread may forget one meanwhile.
        failures = [*self._failures.values(), *self._duplicates.values()]
        if failures:
            self._directory.publish(self.path, lambda path: self._write(path, failures))
        elif self.path.exists():
            self._directory.remove(self.path)


def _line(failure: Failure) -> tuple[str, str]:
    return failure.id, failure.source


def read_parquet(path: Path) -> list[Failure]:
    """Raises ``OSError``, ``ValueError`` or ``TypeError``."""
    import pyarrow.parquet as pq

    return [Failure(**row) for row in pq.ParquetFile(path).read(columns=list(_COLUMNS)).to_pylist()]


def write_parquet(path: Path, failures: Sequence[Failure]) -> None:
    """The columns id, page, source and reason."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.int32() if name == "page" else pa.string()) for name in _COLUMNS])
    columns = {name: [getattr(failure, name) for failure in failures] for name in _COLUMNS}
    pq.write_table(pa.table(columns, schema), path, compression="zstd")
