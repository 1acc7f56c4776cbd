"""One client process of the overload benchmark: requests that come when they are due, answered or not."""

from __future__ import annotations

import asyncio
import random
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import cast

import orjson
import uvloop

# Requests that may be unanswered at a time: a service that stops answering must not fill this machine.
_MOST_OUTSTANDING = 4096
_LAST_ANSWER_SECONDS = 120.0
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)")


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
    """Sends and counts in callbacks: tasks, streams and new texts would cost several times as much, which
    on a small machine is taken from the service."""

    def __init__(self, plan: Flood) -> None:
        self._plan = plan
        self._answers = Answers()
        self._idle: list[_Connection] = []
        self._open = 0
        self._outstanding = 0
        self._over = asyncio.Event()
        self._connecting: set[asyncio.Task[None]] = set()
        texts = ["word " * plan.words] * plan.inputs
        body = orjson.dumps(
            {"model": plan.model_name, "input": ["@", *texts[1:]], "encoding_format": "base64"}
        )
        # What is new in a request is its first text's first word.
        self._before, _, self._after = body.partition(b"@")
        self._after = b" " + texts[0].encode() + self._after
        self._numbers = count(plan.seed * 10**9)

    async def run(self) -> Answers:
        await asyncio.sleep(max(0.0, self._plan.start - time.time()))
        await (self._closed() if self._plan.concurrency else self._send_when_due())
        for connection in self._idle:
            connection.close()
        return self._answers

    async def _closed(self) -> None:
        for _ in range(self._plan.concurrency):
            self._ask(time.time())
        await self._all_answered()

    async def _send_when_due(self) -> None:
        chance = random.Random(self._plan.seed)
        due, end = self._plan.start, self._plan.start + self._plan.seconds
        while due < end:
            due += chance.expovariate(self._plan.rate)
            if due > time.time():
                await asyncio.sleep(due - time.time())
            if self._outstanding >= _MOST_OUTSTANDING:
                self._answers.late += 1
                continue
            self._ask(due)
        await self._all_answered()

    async def _all_answered(self) -> None:
        if not self._outstanding:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_ANSWER_SECONDS):
                await self._over.wait()
        if self._outstanding:
            self._answers.failed["unanswered"] = self._outstanding

    def _ask(self, due: float) -> None:
        self._outstanding += 1
        self._over.clear()
        number = b"%d" % next(self._numbers)
        body = self._before + number + self._after
        while self._idle:
            connection = self._idle.pop()
            # Before a server could close it, as many do after five seconds.
            if connection.usable and time.time() - connection.used < 3.0:
                connection.send(due, body)
                return
            connection.close()
        url = self._plan.urls[self._open % len(self._plan.urls)]
        self._open += 1
        task = asyncio.get_running_loop().create_task(self._send_on_a_new_one(url, due, body))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _send_on_a_new_one(self, url: str, due: float, body: bytes) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: _Connection(self, host), host, int(port))
        except OSError as error:
            self.failed(type(error).__name__)
            return
        connection.send(due, body)

    def answered(self, connection: _Connection, due: float, status: int, retry_after: bool) -> None:
        now = connection.used = time.time()
        self._idle.append(connection)
        if status == 200:
            self._answers.good.append((now, now - due))
        elif status == 429:
            self._answers.refused.append((now, now - due))
            self._answers.without_retry_after += not retry_after
        else:
            self._answers.failed[str(status)] = self._answers.failed.get(str(status), 0) + 1
        self._next()

    def failed(self, why: str) -> None:
        self._answers.failed[why] = self._answers.failed.get(why, 0) + 1
        self._next()

    def _next(self) -> None:
        self._outstanding -= 1
        if self._plan.concurrency and time.time() < self._plan.start + self._plan.seconds:
            self._ask(time.time())
        if not self._outstanding:
            self._over.set()


class _Connection(asyncio.Protocol):
    """Just enough HTTP/1.1 to cost the client little."""

    def __init__(self, client: _Client, host: str) -> None:
        self._client = client
        self._head = (
            f"POST /v1/embeddings HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            "Content-Length: "
        ).encode()
        self._received = b""
        self._missing = 0
        self._due: float | None = None
        self.usable = True
        self.used = time.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, due: float, body: bytes) -> None:
        self._due = due
        self._transport.writelines((self._head, b"%d\r\n\r\n" % len(body), body))

    def data_received(self, data: bytes) -> None:
        if self._missing:
            # The rest of a body, which nobody looks at.
            self._missing -= len(data)
        else:
            self._received += data
            head, end, body = self._received.partition(b"\r\n\r\n")
            if not end:
                return
            self._received = b""
            self._answer = head.lower()
            length = _LENGTH.search(self._answer)
            self._missing = int(length[1]) - len(body) if length else 0
        if self._missing <= 0 and self._due is not None:
            due, self._due = self._due, None
            status = int(self._answer[9:12])
            self._client.answered(self, due, status, b"\r\nretry-after: " in self._answer)

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._due is not None:
            self._due = None
            self._client.failed(type(error).__name__ if error else "closed")

    def close(self) -> None:
        self._transport.close()
