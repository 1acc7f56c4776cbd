"""Work that is done before its result is asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from tessera_corpus.item import Row, size_of

# A file of a slow disk or a far host takes some 50 ms, and an engine wants 50 pages a second.
_THREADS: Final = 16
_AHEAD: Final = 64
_AHEAD_BYTES: Final = 256 << 20

Rows = Sequence[Row]
Work = Rows | Callable[[], Rows]
"""Rows, or what makes them: a read of a file or a URL."""


def ahead(works: Iterable[Work]) -> Iterator[Row]:
    """All rows, in the order of what makes them, which threads do before they are asked for.

    Bounded in number, and in bytes but for what is on the threads. Rows that are there cost no thread: to
    hand a short line to one takes 160 us, and to read it 30.
    """
    held = _Held()
    pending: deque[Rows | Future[Rows]] = deque()
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="load")

    def load(work: Callable[[], Rows]) -> Rows:
        rows = work()
        held.add(rows)
        return rows

    def first() -> Rows:
        rows = pending.popleft()
        if isinstance(rows, Future):
            rows = rows.result()
            held.remove(rows)
        return rows

    try:
        for work in works:
            if callable(work):
                pending.append(pool.submit(load, work))
            elif pending:
                pending.append(work)
            else:
                yield from work
            while len(pending) >= _AHEAD or (pending and held.nbytes >= _AHEAD_BYTES):
                yield from first()
        while pending:
            yield from first()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Held:
    """Bytes of rows that are there and wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.nbytes = 0

    def add(self, rows: Rows) -> None:
        with self._lock:
            self.nbytes += sum(map(size_of, rows))

    def remove(self, rows: Rows) -> None:
        with self._lock:
            self.nbytes -= sum(map(size_of, rows))
