"""One client process of the overload benchmark: requests that come when they are due, answered or not."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from itertools import count

import orjson
import uvloop

# Requests that may be unanswered at a time: a service that stops answering must not fill this machine.
_MOST_OUTSTANDING = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood:
    """``rate`` requests a second for ``seconds``, from ``start`` of ``time.time`` on.

    A request holds ``inputs`` texts of ``words`` words. ``concurrency`` instead of a rate is a closed loop.
    """

    urls: tuple[str, ...]
    model_name: str
    inputs: int
    words: int
    rate: float = 0.0
    concurrency: int = 0
    start: float
    seconds: float
    seed: int


@dataclass(slots=True)
class Answers:
    """When each answer came (``time.time``) and the seconds it took since the request was due, by status."""

    good: list[tuple[float, float]] = field(default_factory=list)
    refused: list[tuple[float, float]] = field(default_factory=list)
    without_retry_after: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    late: int = 0

    def join(self, other: Answers) -> None:
        self.good += other.good
        self.refused += other.refused
        self.without_retry_after += other.without_retry_after
        self.late += other.late
        for why, number in other.failed.items():
            self.failed[why] = self.failed.get(why, 0) + number


def flood(plan: Flood) -> Answers:
    """The process's main."""
    return uvloop.run(_Client(plan).run())


class _Client:
    def __init__(self, plan: Flood) -> None:
        self._plan = plan
        self._answers = Answers()
        self._idle: list[_Connection] = []
        self._numbers = count()
        self._opened = 0

    async def run(self) -> Answers:
        await asyncio.sleep(max(0.0, self._plan.start - time.time()))
        await (self._closed() if self._plan.concurrency else self._open())
        for connection in self._idle:
            connection.close()
        return self._answers

    async def _closed(self) -> None:
        end = self._plan.start + self._plan.seconds

        async def one() -> None:
            while time.time() < end:
                await self._ask(time.time())

        await asyncio.gather(*(one() for _ in range(self._plan.concurrency)))

    async def _open(self) -> None:
        chance = random.Random(self._plan.seed)
        due, end = self._plan.start, self._plan.start + self._plan.seconds
        running: set[asyncio.Task[None]] = set()
        while due < end:
            due += chance.expovariate(self._plan.rate)
            if due > time.time():
                await asyncio.sleep(due - time.time())
            if len(running) >= _MOST_OUTSTANDING:
                self._answers.late += 1
                continue
            task = asyncio.create_task(self._ask(due))
            running.add(task)
            task.add_done_callback(running.discard)
        if running:
            await asyncio.wait(running)

    async def _ask(self, due: float) -> None:
        connection = self._take_idle() or await self._connect()
        if connection is None:
            return
        try:
            status, retry_after = await asyncio.wait_for(connection.post(self._body()), 120)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            why = type(error).__name__
            self._answers.failed[why] = self._answers.failed.get(why, 0) + 1
            connection.close()
            return
        now = connection.used = time.time()
        self._idle.append(connection)
        if status == 200:
            self._answers.good.append((now, now - due))
        elif status == 429:
            self._answers.refused.append((now, now - due))
            self._answers.without_retry_after += not retry_after
        else:
            self._answers.failed[str(status)] = self._answers.failed.get(str(status), 0) + 1

    def _take_idle(self) -> _Connection | None:
        # Before a server could close it, as many do after five seconds; the oldest are at the front.
        while self._idle and time.time() - self._idle[0].used > 3.0:
            self._idle.pop(0).close()
        return self._idle.pop() if self._idle else None

    async def _connect(self) -> _Connection | None:
        self._opened += 1
        try:
            return await _Connection.open(self._plan.urls[self._opened % len(self._plan.urls)])
        except OSError as error:
            why = type(error).__name__
            self._answers.failed[why] = self._answers.failed.get(why, 0) + 1
            return None

    def _body(self) -> bytes:
        number = next(self._numbers)
        texts = [
            f"{self._plan.seed} {number} {index} " + "word " * self._plan.words
            for index in range(self._plan.inputs)
        ]
        return orjson.dumps({"model": self._plan.model_name, "input": texts, "encoding_format": "base64"})


class _Connection:
    """Just enough HTTP/1.1 to cost the client little."""

    def __init__(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._host, self._reader, self._writer = host, reader, writer
        self.used = time.time()

    @classmethod
    async def open(cls, url: str) -> _Connection:
        host, _, port = url.removeprefix("http://").partition(":")
        return cls(host, *await asyncio.open_connection(host, int(port), limit=1 << 20))

    async def post(self, body: bytes) -> tuple[int, int]:
        """The status, and the seconds in ``Retry-After`` or 0."""
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        received = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(b":") for line in received)
        }
        await self._reader.readexactly(int(headers[b"content-length"]))
        return int(received[0].split()[1]), int(headers.get(b"retry-after", b"0"))

    def close(self) -> None:
        self._writer.close()
