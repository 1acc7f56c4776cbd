"""One run: rows of a source to vectors in an output, with everything on the way bounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from tessera.local import groups
from tessera.local.groups import IN_FLIGHT, Size, size_of
from tessera_corpus.embedder import Embedder
from tessera_corpus.item import Embedded, Failure, Item

if TYPE_CHECKING:
    from tessera_corpus.output.output import Output

T = TypeVar("T")

# Of vectors that wait while a part is published, which takes half a second of 16,384 short texts: engines
# that wait with them stood still for 7 % of an H200's time.
_UNWRITTEN_BYTES: Final = 64 << 20


@dataclass(slots=True)
class Progress:
    """What a run has done so far. ``done_before`` had vectors at the start, ``taken`` came from the source.

    ``warned`` are of those embedded.
    """

    taken: int = 0
    embedded: int = 0
    warned: int = 0
    failed: int = 0
    first_failure: Failure | None = None
    done_before: int = 0
    # Of engines: whether they are on their way, and the seconds until they were there.
    starting: bool = False
    starting_seconds: float = 0.0
    # Seconds: of waiting for room, and of writing.
    full_seconds: float = 0.0
    writing_seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def fresh(
    rows: Iterator[Item | Failure], done: Callable[[str, bytes], bool], progress: Progress
) -> Iterator[Item | Failure]:
    """The rows without those that are done."""
    for row in rows:
        if isinstance(row, Item) and done(row.id, row.content_hash):
            progress.done_before += 1
        else:
            yield row


async def run(rows: Iterator[Item | Failure], embedder: Embedder, output: Output, progress: Progress) -> None:
    """Embed all rows and publish the output.

    What was embedded is published however this ends: with an error, or by a cancellation. Raises what the
    source, the embedder or the output raise.
    """
    async with _publishing(output, progress) as (reading, writer):
        await _embed(rows, embedder, writer, reading, progress)


async def keep(made: Iterator[Sequence[Embedded | Failure]], output: Output, progress: Progress) -> None:
    """Put what is embedded elsewhere into the output and publish it, as ``run`` does."""
    async with _publishing(output, progress) as (reading, writer):
        loop = asyncio.get_running_loop()
        while (some := await loop.run_in_executor(reading, next, made, None)) is not None:
            progress.taken += len(some)
            await writer.put(some)


@asynccontextmanager
async def _publishing(
    output: Output, progress: Progress
) -> AsyncIterator[tuple[ThreadPoolExecutor, _Writer]]:
    """Give a thread to read on, and what writes; publish the output however this ends."""
    # Not waited for: a read from a terminal may never return.
    reading = ThreadPoolExecutor(1, thread_name_prefix="read")
    with ThreadPoolExecutor(1, thread_name_prefix="write") as writing:
        writer = _Writer(output, writing, progress)
        try:
            yield reading, writer
            await writer.finish()
        finally:
            reading.shutdown(wait=False)
            await _whole(writing, output.close)


async def _embed(
    rows: Iterator[Item | Failure],
    embedder: Embedder,
    writer: _Writer,
    reading: ThreadPoolExecutor,
    progress: Progress,
) -> None:
    most_weight, most_bytes = IN_FLIGHT
    room = _Room(most_weight * embedder.engines, most_bytes)
    unwritten = _Room(_UNWRITTEN_BYTES)
    begun = False
    try:
        async with asyncio.TaskGroup() as group:

            async def embed(items: list[Item], give_room: Callable[[], None]) -> None:
                made = await embedder.embed(items)
                size = sum(one.rows.nbytes for one in made if isinstance(one, Embedded))
                give_unwritten = await unwritten.take(size)
                give_room()
                try:
                    await writer.put(made)
                finally:
                    give_unwritten()

            while True:
                taken, (weight, nbytes) = await asyncio.get_running_loop().run_in_executor(
                    reading, groups.take, rows, _size_of
                )
                if not taken:
                    break
                progress.taken += len(taken)
                items = [row for row in taken if isinstance(row, Item)]
                if len(items) < len(taken):
                    await writer.put([row for row in taken if isinstance(row, Failure)])
                if items:
                    if not begun:
                        started, progress.starting, begun = time.monotonic(), True, True
                        await embedder.ready()
                        progress.starting = False
                        progress.starting_seconds = time.monotonic() - started
                    started = time.monotonic()
                    give_room = await room.take(weight, nbytes)
                    progress.full_seconds += time.monotonic() - started
                    task = group.create_task(embed(items, give_room))
                    # One that is cancelled before its first step gives nothing back by itself.
                    task.add_done_callback(partial(_call, give_room))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _call(give: Callable[[], None], _: asyncio.Task[None]) -> None:
    give()


def take(rows: Iterator[Item | Failure]) -> list[Item | Failure]:
    """Return the next rows for one call; none at the end."""
    return groups.take(rows, _size_of)[0]


def _size_of(row: Item | Failure) -> Size:
    return size_of(row.parts) if isinstance(row, Item) else (0, 0)


class _Room:
    """Bounds what is under way, by one measure or several; something larger than all of it goes alone."""

    def __init__(self, *most: int) -> None:
        self._most = most
        self._taken = [0] * len(most)
        self._count = 0
        self._given = asyncio.Event()

    async def take(self, *sizes: int) -> Callable[[], None]:
        """Wait for room, in no order where several do; what is returned gives it back once."""
        while self._count and any(
            taken + size > most for taken, size, most in zip(self._taken, sizes, self._most, strict=True)
        ):
            self._given.clear()
            await self._given.wait()
        self._count += 1
        self._add(sizes)
        held = True

        def give() -> None:
            nonlocal held
            if held:
                held = False
                self._count -= 1
                self._add([-size for size in sizes])
                self._given.set()

        return give

    def _add(self, sizes: Sequence[int]) -> None:
        self._taken = [taken + size for taken, size in zip(self._taken, sizes, strict=True)]


class _Writer:
    """Puts what was embedded into the output, on one thread."""

    def __init__(self, output: Output, thread: ThreadPoolExecutor, progress: Progress) -> None:
        self._output = output
        self._thread = thread
        self._progress = progress

    async def put(self, made: Sequence[Embedded | Failure]) -> None:
        await _whole(self._thread, lambda: self._put(made))

    async def finish(self) -> None:
        # Sources in which nothing is may be away.
        if self._progress.taken or self._progress.done_before:
            await _whole(self._thread, self._output.finish)

    def _put(self, made: Sequence[Embedded | Failure]) -> None:
        started = time.monotonic()
        good = [one for one in made if isinstance(one, Embedded)]
        if good:
            self._output.put(good)
        progress = self._progress
        progress.embedded += len(good)
        progress.warned += sum(one.warning is not None for one in good)
        for one in made:
            if isinstance(one, Failure):
                progress.failed += 1
                progress.first_failure = progress.first_failure or one
                self._output.fail(one)
        progress.writing_seconds += time.monotonic() - started


async def _whole(thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """``work`` on a thread. What has begun there is over when this is, however it ends."""
    future = asyncio.get_running_loop().run_in_executor(thread, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
