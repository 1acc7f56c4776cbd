"""Parquet files: their rows, read in a confined process that a file may crash, hang or fill.

A file comes as a descriptor, and rows go back in shared memory, as texts, bytes and numbers.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from tessera.extras import absent, missing
from tessera.local.content import ImageFile
from tessera.sandbox import Limits, Pool, ProcessLost
from tessera.sandbox.memory import Memory
from tessera_corpus.sources import cells
from tessera_corpus.sources.settings import Columns

MOST_ROWS: Final = 64
"""Rows that are read at a time: images of a megabyte each are to stay below what waits elsewhere."""

# What rows of a batch may take before it has fewer of them.
_BATCH_BYTES: Final = 32 << 20
# Beside the largest image that a row may have, three times: its page, the column, the message.
_MEMORY_BYTES: Final = 2 << 30
_BESIDE_BYTES: Final = 64 << 20
_SECONDS: Final = 60.0
_MOST_REASON: Final = 500
_BUFFER_BYTES: Final = 1 << 20


class Unread(Exception):
    """Why a table cannot be read, or not beyond some row of it."""


class Values(msgspec.Struct, frozen=True, array_like=True):
    """The columns of a row that are there; an image is a file, or named. Or what is wrong with them."""

    id: str | None = None
    text: str | None = None
    images: tuple[str | ImageFile, ...] = ()
    page: int | None = None
    wrong: str = ""


def named(columns: Columns, there: Sequence[str]) -> dict[str, str]:
    """Return the names of the columns that are there, by what they hold."""
    return {key: name for key, name in msgspec.structs.asdict(columns).items() if name in there}


def values_of(row: Mapping[str, Any], names: Mapping[str, str]) -> Values:
    """Return the values of a row, as ``cells.rows_of`` gives it, by the columns of ``names``."""
    cell = {key: row[name] for key, name in names.items()}
    id = cells.id_of(cell.get("id")) or None
    text, image = cells.text_of(cell.get("text")), cell.get("image")
    for key, value in (("id", cell.get("id")), ("text", text), ("image", image)):
        if isinstance(value, cells.Unreadable):
            return Values(id=id, wrong=f"{names[key]}: {value.reason}")
    try:
        page = cells.page_of(cell.get("page"))
    except ValueError as error:
        return Values(id=id, wrong=f"{names['page']}: {error}")
    if text is not None and not isinstance(text, str):
        return Values(id=id, page=page, wrong=f"{names['text']}: expected a text")
    try:
        images = cells.images_of(image)
    except ValueError as error:
        return Values(id=id, page=page, wrong=f"{names['image']}: {error}")
    return Values(id=id, text=text, images=images, page=page)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """At most ``most`` rows from ``first`` on, of the file in the descriptor that comes along.

    Equal numbers in ``file`` are one file. With 0 rows it is what the file has.
    """

    file: int
    first: int = 0
    most: int = 0


class Found(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rows of a file and how many bytes of the shared memory are the answer: a list, as msgpack.

    It is one of the names of columns, or of ``Values``.
    """

    rows: int
    size: int


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why the file cannot be read."""

    reason: str


Answer = Found | Refusal

_encode: Final = msgspec.msgpack.Encoder().encode
_decode_task: Final = msgspec.msgpack.Decoder(Task).decode
_answers: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)
_decode_names: Final = msgspec.msgpack.Decoder(list[str]).decode
_decode_rows: Final = msgspec.msgpack.Decoder(list[Values]).decode


class Reader:
    """Reads tables of the same columns in one confined process, which the first table starts.

    ``max_bytes`` bounds an image in a row. Thread-safe.
    """

    def __init__(self, columns: Columns, max_bytes: int) -> None:
        self._columns = columns
        self._shared_bytes = max_bytes + _BESIDE_BYTES
        self._limits = Limits(seconds=_SECONDS, memory_bytes=_MEMORY_BYTES + 3 * max_bytes)
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._pool: Pool[Answer] | None = None
        self._end: weakref.finalize[[], Reader] | None = None

    def open(self, path: Path) -> Opened:
        """Open a file; raises ``Unread``, and ``ConfigError`` where pyarrow is not installed."""
        if absent("pyarrow"):
            raise missing("reading tables", "pyarrow", extra="corpus")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise Unread(error.strerror) from None
        opened = Opened(self, path, descriptor, next(self._numbers))
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Unread("is no regular file")
            opened.describe()
        except BaseException:
            opened.close()
            raise
        return opened

    def close(self) -> None:
        """End the process; nothing may be read."""
        with self._lock:
            end, self._end, self._pool = self._end, None, None
        if end is not None:
            end()

    def ask(self, task: Task, descriptor: int, *, over: str) -> tuple[int, bytes]:
        """Return the rows of the file and the answer; raises ``Unread``."""
        with self._lock:
            if self._pool is None:
                self._pool = self._started()
                # Nobody closes the sources of a run.
                self._end = weakref.finalize(self, self._pool.close)
            pool = self._pool
        try:
            answer = pool.call(_encode(task), descriptor, self._taken, over=over)
        except ProcessLost as loss:
            most = self._limits.memory_bytes >> 20
            raise Unread(
                f"its reader crashed, or would take more than {most} MiB"
                if loss.why == "crash"
                else f"{MOST_ROWS} rows were not read within {_SECONDS:g} seconds of processor time"
            ) from None
        if isinstance(answer, Refusal):
            raise Unread(answer.reason)
        return answer

    def _started(self) -> Pool[Answer]:
        return Pool(
            "table reader",
            f"{__name__}:Handler",
            msgspec.json.encode(self._columns).decode(),
            _answers,
            self._limits,
            # Pages are no memory until they are written to.
            shared_bytes=self._shared_bytes,
            count=1,
        )

    def _taken(self, answer: Answer, memory: Memory) -> tuple[int, bytes] | Refusal:
        if isinstance(answer, Refusal):
            return answer
        if not 0 <= answer.size <= self._shared_bytes or answer.rows < 0:
            raise ProcessLost("crash")
        # A copy, which the process cannot write to any more.
        return answer.rows, memory[: answer.size].tobytes()


class Opened:
    """A file that is being read; closed by whoever opened it."""

    def __init__(self, reader: Reader, path: Path, descriptor: int, number: int) -> None:
        self._reader = reader
        self._path = path
        self._descriptor = descriptor
        self._number = number
        self.count = 0
        self.names: list[str] = []

    def describe(self) -> None:
        """Learn the number of rows and the names of columns; raises ``Unread``."""
        self.count, data = self._ask(Task(file=self._number))
        self.names = _decoded(_decode_names, data)

    def batches(self) -> Iterator[Sequence[Values]]:
        """Yield the rows in order; raises ``Unread`` behind those that could be read."""
        first = 0
        while first < self.count:
            rows = self.rows(first, MOST_ROWS)
            yield rows
            first += len(rows)

    def rows(self, first: int, most: int) -> Sequence[Values]:
        """Return at least one row from ``first`` on, which is one of the file's; raises ``Unread``."""
        _, data = self._ask(Task(file=self._number, first=first, most=most))
        rows: list[Values] = _decoded(_decode_rows, data)
        if not 0 < len(rows) <= most:
            raise Unread(f"has fewer than the {self.count} rows that it says")
        return rows

    def close(self) -> None:
        os.close(self._descriptor)

    def _ask(self, task: Task) -> tuple[int, bytes]:
        return self._reader.ask(task, self._descriptor, over=str(self._path))


def _decoded(decode: Any, data: bytes) -> Any:
    try:
        return decode(data)
    except (msgspec.MsgspecError, ValueError):
        raise Unread("its reader crashed") from None


class Handler:
    """Reads tables, in its confined process. Implements ``sandbox.memory.Handler``."""

    def __init__(self, columns: str) -> None:
        import pyarrow

        # Where memory ends it says so; others reserve more than they use.
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())
        self._columns = msgspec.json.decode(columns, type=Columns)
        self._file: _File | None = None
        # What is imported late is there before the first file: a confined process imports nothing.
        _warm(self._columns)

    def answer(self, memory: Memory, task: bytes, descriptor: int) -> bytes:
        return _encode(self._answer(memory, _decode_task(task), descriptor))

    def _answer(self, memory: Memory, task: Task, descriptor: int) -> Answer:
        try:
            if self._file is None or self._file.number != task.file:
                self._file = None
                self._file = _File(task.file, descriptor, self._columns)
            file = self._file
            data = file.encoded(task.first, task.most, len(memory)) if task.most else _encode(file.names)
            if len(data) > len(memory):
                return Refusal(reason=f"the names of its columns take more than {len(memory)} bytes")
            memory[: len(data)] = np.frombuffer(data, np.uint8)
            return Found(rows=file.count, size=len(data))
        except MemoryError:
            self._file = None
            return Refusal(reason="takes more memory than a reader has")
        except Exception as error:
            self._file = None
            return Refusal(reason=" ".join(str(error).split())[:_MOST_REASON] or type(error).__name__)


class _File:
    """The file that is open, and its rows behind those that were asked for last."""

    def __init__(self, number: int, descriptor: int, columns: Columns) -> None:
        import pyarrow
        import pyarrow.parquet

        self.number = number
        # A process may be killed by threads that it cannot have: none are asked for anywhere.
        self._parquet = pyarrow.parquet.ParquetFile(
            pyarrow.PythonFile(_Readable(descriptor), mode="r"), buffer_size=_BUFFER_BYTES, pre_buffer=False
        )
        self.count: int = self._parquet.metadata.num_rows
        self.names: list[str] = self._parquet.schema_arrow.names
        self._columns = named(columns, self.names)
        self._next = 0
        self._left: Iterator[Values] = iter(())
        self._held: Values | None = None
        self._begun = False
        self._damage: Exception | None = None

    def encoded(self, first: int, most: int, most_bytes: int) -> bytes:
        """Return at most ``most`` rows from ``first`` on, as many as fit, as a list in msgpack."""
        if not self._begun or first != self._next:
            self._left, self._held, self._begun = self._from(first), None, True
            self._next, self._damage = first, None
        if self._damage is not None:
            raise self._damage
        rows: list[bytes] = []
        # The list's own head.
        nbytes = 8
        while len(rows) < most:
            try:
                values = self._held or next(self._left, None)
            except Exception as error:
                if not rows:
                    raise
                # Those before it are good.
                self._damage = error
                break
            self._held = None
            if values is None:
                break
            data = _encode(values)
            if nbytes + len(data) > most_bytes or (rows and nbytes + len(data) > _BATCH_BYTES):
                if rows:
                    self._held = values
                    break
                data = _encode(Values(wrong=f"a row of more than {most_bytes >> 20} MiB"))
            rows.append(data)
            nbytes += len(data)
        self._next += len(rows)
        return b"\xdd" + len(rows).to_bytes(4, "big") + b"".join(rows)

    def _from(self, first: int) -> Iterator[Values]:
        metadata, before = self._parquet.metadata, 0
        groups = list(range(metadata.num_row_groups))
        while groups and before + (size := metadata.row_group(groups[0]).num_rows) <= first:
            before += size
            groups.pop(0)
        skipped = first - before
        for group in groups:
            described = metadata.row_group(group)
            each = max(1, described.total_byte_size // max(1, described.num_rows))
            batches = self._parquet.iter_batches(
                max(1, min(MOST_ROWS, _BATCH_BYTES // each)),
                row_groups=[group],
                columns=sorted(set(self._columns.values())),
                use_threads=False,
            )
            for batch in batches:
                for row in cells.rows_of(batch.slice(min(skipped, batch.num_rows))):
                    yield values_of(row, self._columns)
                skipped = max(0, skipped - batch.num_rows)


class _Readable:
    """A descriptor as Arrow reads a file: a confined process may neither open nor map it."""

    def __init__(self, descriptor: int) -> None:
        # The one that came with the task is closed behind it.
        self._descriptor = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)
        self._size = os.lseek(self._descriptor, 0, os.SEEK_END)
        self._at = 0

    @property
    def closed(self) -> bool:
        return self._descriptor < 0

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + {0: 0, 1: self._at, 2: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        size = self._size - self._at if size is None or size < 0 else size
        data = os.pread(self._descriptor, max(0, min(size, self._size - self._at)), self._at)
        self._at += len(data)
        return data


def _warm(columns: Columns) -> None:
    """Read a small table of every kind of column that is wanted, and of every compression."""
    import io

    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(
        {
            "id": pyarrow.array([1]),
            "text": pyarrow.array(["a"]),
            "image": pyarrow.array([{"bytes": b"a", "path": "a"}]),
            "date": pyarrow.array([0], pyarrow.timestamp("us", tz="UTC")),
            "amount": pyarrow.array([1], pyarrow.decimal128(9)),
        }
    )
    for compression in ("none", "snappy", "gzip", "brotli", "lz4", "zstd"):
        with suppress(NotImplementedError, OSError):
            file = io.BytesIO()
            pyarrow.parquet.write_table(table, file, compression=compression)
            descriptor = os.memfd_create("table")
            try:
                os.write(descriptor, file.getvalue())
                read = _File(0, descriptor, columns)
                read.encoded(0, 1, _BATCH_BYTES)
                read._parquet.read(use_threads=False).to_pylist()
            finally:
                os.close(descriptor)
