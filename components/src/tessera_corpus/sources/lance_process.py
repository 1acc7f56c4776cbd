"""``python -m tessera_corpus.sources.lance_process FD``: reads a Lance table, which may end this process.

Its library opens files and starts threads as it goes, so it cannot be confined as a reader of Parquet is. It
has limits on memory, writes no file, and ends with whoever asks.
"""

from __future__ import annotations

from tessera.garbage import quick_imports

with quick_imports():
    import resource
    from collections.abc import Iterator
    from contextlib import contextmanager
    from multiprocessing.connection import Connection
    from typing import Any, Final

    import msgspec

    from tessera_corpus.sources import cells
    from tessera_corpus.sources.child import run
    from tessera_corpus.sources.parquet import MOST_ROWS, Unread, Values, named, values_of
    from tessera_corpus.sources.settings import Columns

MEMORY_BYTES: Final = 8 << 30
"""Of its own: the library holds several batches at a time."""


class OpenTable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message to the process."""

    path: str
    columns: Columns


class AskRows(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """At most ``most`` rows from ``first`` on; with 0, the next ones in order."""

    first: int = 0
    most: int = 0


class About(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``OpenTable``."""

    count: int
    names: list[str]


class Rows(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``AskRows``; none at the end."""

    values: list[Values]


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why there is no other answer."""

    reason: str


Asked = OpenTable | AskRows
Answer = About | Rows | Refused


class _Table:
    def __init__(self, path: str, columns: Columns) -> None:
        import lance

        with _errors():
            self._table = lance.dataset(path)
            self.about = About(count=self._table.count_rows(), names=self._table.schema.names)
        self._named = named(columns, self.about.names)
        self._batches: Iterator[Any] | None = None

    def rows(self, asked: AskRows) -> Rows:
        with _errors():
            if asked.most:
                return self._values(
                    self._table.take(range(asked.first, asked.first + asked.most), columns=self._columns)
                )
            if self._batches is None:
                self._batches = iter(
                    self._table.to_batches(columns=self._columns, batch_size=MOST_ROWS, scan_in_order=True)
                )
            batch = next(self._batches, None)
            return Rows(values=[]) if batch is None else self._values(batch)

    def _values(self, batch: Any) -> Rows:
        return Rows(values=[values_of(row, self._named) for row in cells.rows_of(batch)])

    @property
    def _columns(self) -> list[str]:
        return sorted(set(self._named.values()))


@contextmanager
def _errors() -> Iterator[None]:
    """Raise ``Unread`` for what the library raises."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, NotImplementedError, MemoryError) as error:
        raise Unread(" ".join(str(error).split()) or "takes more memory than a reader has") from None
    except BaseException as error:
        # What Rust's panics are.
        if type(error).__name__ != "PanicException":
            raise
        raise Unread("its reader crashed") from None


def serve(connection: Connection) -> None:
    """Answer until whoever asks has gone, which raises ``EOFError``."""
    decode, encode = msgspec.msgpack.Decoder(Asked).decode, msgspec.msgpack.Encoder().encode
    table: _Table | None = None
    while True:
        asked = decode(connection.recv_bytes())
        answer: Answer
        try:
            if isinstance(asked, OpenTable):
                table = _Table(asked.path, asked.columns)
                answer = table.about
            else:
                assert table is not None
                answer = table.rows(asked)
        except Unread as error:
            answer = Refused(reason=str(error))
        connection.send_bytes(encode(answer))


def _limit() -> None:
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_DATA, MEMORY_BYTES),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    _limit()
    run(serve)
