"""One client process: a closed loop of so many connections, or an open loop at a given rate."""

from __future__ import annotations

import asyncio
import base64
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import orjson
import uvloop

from tessera_tools.load.bodies import Bodies, Body, HttpWorkload
from tessera_tools.load.words import Words

_CHECK_EVERY = 8
_SAME = 0.998
# Of scores in bfloat16, in other batches.
_SCORES_SAME = 0.05
_CLIENT_STARTS_SECONDS = 120.0
_LAST_ANSWER_SECONDS = 90.0
_BUFFER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How each workload is driven, by ``clients`` processes for ``seconds`` after ``warm`` more.

    ``encoding`` is that of the answers, float or base64; without ``check`` nobody looks into them.
    ``tolerance`` is how far from 1 a vector's length may be. With ``chat`` texts are conversations. ``path``
    is where inputs are embedded, and ``key`` an API key that is sent along.
    """

    words: Words
    model_name: str
    clients: int
    open_loop: bool = False
    warm: float
    seconds: float
    encoding: str = "base64"
    check: bool = True
    tolerance: float = 1e-3
    chat: bool = False
    path: str = "/v1/embeddings"
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One process's part: ``rate`` requests a second, or None for a closed loop of ``concurrency``.

    What completes inside the window counts. It stays open until something has: a row without an answer says
    nothing.
    """

    load: Load
    urls: tuple[str, ...]
    workload: HttpWorkload
    concurrency: int
    rate: float | None
    seed: int


@dataclass(slots=True)
class Outcome:
    """Latencies in seconds of the good answers inside the window, which was open for ``seconds``."""

    latencies: list[float] = field(default_factory=list)
    inputs: int = 0
    seconds: float = 0.0
    checked: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> str:
        """What went wrong and how often; 0 when nothing did."""
        return " ".join(f"{times}x{why}" for why, times in self.errors.items()) or "0"

    @property
    def requests_rate(self) -> float:
        """Requests a second."""
        return len(self.latencies) / self.seconds

    @property
    def inputs_rate(self) -> float:
        """Inputs a second."""
        return self.inputs / self.seconds

    def quantiles(self, *shares: float) -> list[float | None]:
        """Milliseconds within which these shares of the good answers came; None where there was none."""
        if not self.latencies:
            return [None] * len(shares)
        return [float(quantile) * 1e3 for quantile in np.quantile(self.latencies, shares)]

    def fail(self, why: str) -> None:
        self.errors[why] = self.errors.get(why, 0) + 1

    def join(self, other: Outcome) -> None:
        self.latencies += other.latencies
        self.inputs += other.inputs
        self.seconds = max(self.seconds, other.seconds)
        self.checked += other.checked
        for why, times in other.errors.items():
            self.errors[why] = self.errors.get(why, 0) + times


class Watch(Protocol):
    """Looks at the machine when the window opens and when it closes."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


def drive(
    load: Load, urls: Sequence[str], workload: HttpWorkload, loop: float, watch: Watch | None = None
) -> Outcome:
    """Spread one measurement over the client processes and join what they saw.

    ``loop`` is the number of connections, or of requests a second in an open loop. Raises ``RuntimeError``
    when a client process has died.
    """
    context = multiprocessing.get_context("spawn")
    count = load.clients if load.open_loop else min(load.clients, int(loop))
    urls = tuple(urls)
    pipes, processes = [], []
    for number in range(count):
        mine, theirs = context.Pipe()
        plan = Plan(
            load=load,
            urls=urls[number % len(urls) :] + urls[: number % len(urls)],
            workload=workload,
            concurrency=divided(int(loop), count, number),
            rate=loop / count if load.open_loop else None,
            # What comes again is one set, whoever sends it.
            seed=time.time_ns() % 1_000_000 + number if workload.fresh else 0,
        )
        process = context.Process(target=run, args=(plan, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    joined = Outcome()
    try:
        for pipe in pipes:
            _received(pipe, _CLIENT_STARTS_SECONDS)
        start = time.time()
        for pipe in pipes:
            pipe.send(start)
        if watch is not None:
            time.sleep(max(0.0, start + load.warm - time.time()))
            watch.begin()
        limit = start + load.warm + load.seconds + _LAST_ANSWER_SECONDS
        for pipe in pipes:
            _received(pipe, limit - time.time())
        if watch is not None:
            watch.end()
        for pipe in pipes:
            joined.join(_received(pipe, limit - time.time()))
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()
    return joined


def divided(loops: int, count: int, number: int) -> int:
    """How many of so many loops the process ``number`` of ``count`` has; they differ by one at most."""
    return loops // count + (number < loops % count)


def _received(pipe: Connection, seconds: float) -> Any:
    """What a client says next; raises ``RuntimeError`` when that takes too long or it has died."""
    try:
        if pipe.poll(max(0.0, seconds)):
            return pipe.recv()
    except (EOFError, OSError) as error:
        raise RuntimeError("a client process has died") from error
    raise RuntimeError("a client process is stuck: the service left its last request unanswered")


def run(plan: Plan, pipe: Connection) -> None:
    """The process's main: tells when it is ready and, after the starting time, when its window closes, and
    sends the outcome."""
    load = plan.load
    bodies = Bodies(
        plan.workload,
        load.words,
        load.model_name,
        seed=plan.seed,
        encoding=load.encoding,
        chat=load.chat,
        path=load.path,
    )
    pipe.send("ready")
    start = float(pipe.recv()) + load.warm
    pipe.send(uvloop.run(_Load(plan, iter(bodies), start).run(lambda: pipe.send("closed"))))


class _Load:
    def __init__(self, plan: Plan, bodies: Iterator[Body], start: float) -> None:
        self.plan = plan
        self.bodies = bodies
        self.start = start
        self.answered = asyncio.Event()
        self.closed = False
        self.outcome = Outcome()
        self.vectors: dict[int, np.ndarray] = {}
        self.sent = 0
        self.idle: list[_Http] = []

    async def run(self, closed: Callable[[], None]) -> Outcome:
        """Call ``closed`` when the window closes; what is under way then is waited for and does not count."""
        if self.plan.rate:
            loops = [self._open_loop(self.plan.rate)]
        else:
            loops = [self._closed_loop(number) for number in range(self.plan.concurrency)]
        await asyncio.gather(self._window(closed), *loops)
        return self.outcome

    async def _window(self, closed: Callable[[], None]) -> None:
        await asyncio.sleep(self.start + self.plan.load.seconds - time.time())
        await self.answered.wait()
        self.closed = True
        self.outcome.seconds = time.time() - self.start
        closed()

    async def _closed_loop(self, number: int) -> None:
        http = self._http(self.plan.urls[number % len(self.plan.urls)])
        while not self.closed:
            await self._one(http, time.time())
        http.close()

    async def _open_loop(self, rate: float) -> None:
        random_source = random.Random(self.plan.seed)
        due = time.time()
        running: set[asyncio.Task[None]] = set()
        while not self.closed:
            due += random_source.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.time()))
            http = self.idle.pop() if self.idle else self._http(random_source.choice(self.plan.urls))
            # Latency counts from when the request was due: a late client must not flatter the server.
            task = asyncio.create_task(self._lent(http, due))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
        for http in self.idle:
            http.close()

    def _http(self, url: str) -> _Http:
        return _Http(url, self.plan.load.key)

    async def _lent(self, http: _Http, due: float) -> None:
        await self._one(http, due)
        self.idle.append(http)

    async def _one(self, http: _Http, due: float) -> None:
        body = next(self.bodies)
        try:
            status, answer = await http.post(body.path, body.data)
        except OSError as error:
            self.outcome.fail(type(error).__name__)
            self.answered.set()
            http.close()
            return
        now = time.time()
        if now < self.start or self.closed:
            return
        self.answered.set()
        self.sent += 1
        if status != 200:
            self.outcome.fail(str(status))
            await asyncio.sleep(0.05)
        elif self.plan.load.check and self.sent % _CHECK_EVERY == 1 and not self._good(body, answer):
            self.outcome.fail("wrong answer")
        else:
            self.outcome.latencies.append(now - due)
            self.outcome.inputs += body.inputs

    def _good(self, body: Body, answer: memoryview | bytes) -> bool:
        """Unit vectors or one score for each input, and the same for the same input as before."""
        found = orjson.loads(answer)
        rows = found["data"]
        if len(rows) != body.inputs:
            return False
        if "score" in rows[0]:
            scores = np.array([row["score"] for row in rows], np.float64)
            self.outcome.checked += 1
            known = self.vectors.setdefault(body.key, scores)
            return bool(np.allclose(known, scores, rtol=_SCORES_SAME, atol=_SCORES_SAME))
        vectors = np.concatenate([matrix(row, found) for row in rows])
        if not np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=self.plan.load.tolerance):
            return False
        self.outcome.checked += 1
        before = self.vectors.setdefault(body.key, vectors)
        return before.shape == vectors.shape and bool(((before * vectors).sum(axis=1) > _SAME).all())


def matrix(row: dict[str, Any], answer: dict[str, Any]) -> np.ndarray:
    """``[1, width]``, or a row for each token, of one of an answer's ``data``.

    vLLM's base64 of a matrix lacks its shape, which are the tokens of an answer with one input.
    """
    embedding = row.get("embedding", row.get("data"))
    if isinstance(embedding, str):
        count = 1 if "embedding" in row else answer["usage"]["prompt_tokens"]
        return np.frombuffer(base64.b64decode(embedding), "<f4").reshape(row.get("shape", (count, -1)))
    return np.atleast_2d(np.array(embedding, "<f4"))


class _Http:
    """A keep-alive connection; just enough HTTP/1.1 to cost the client little."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parsed = urlsplit(url)
        self._host, self._tls = parsed.hostname or "", parsed.scheme == "https"
        self._port = parsed.port or (443 if self._tls else 80)
        self._key = f"Authorization: Bearer {key}\r\n" if key else ""
        self._open: tuple[asyncio.Transport, _Received] | None = None

    async def post(self, path: str, body: bytes) -> tuple[int, memoryview | bytes]:
        """Return the status and the body, which holds until the next call.

        Raises ``OSError``, also for a connection that ends before its answer does.
        """
        if self._open is None or self._open[1].ended:
            self._open = await asyncio.get_running_loop().create_connection(
                _Received, self._host, self._port, ssl=self._tls or None
            )
        transport, received = self._open
        received.begin()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        head += self._key
        transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        end = await received.found(b"\r\n\r\n", 0)
        lines = bytes(received.part(0, end)).split(b"\r\n")
        status, start = int(lines[0].split()[1]), end + 4
        for line in lines:
            if line.lower().startswith(b"content-length:"):
                last = start + int(line[15:])
                await received.until(last)
                return status, received.part(start, last)
        # Without a length it comes in chunks, the last one empty.
        chunks = []
        while True:
            end = await received.found(b"\r\n", start)
            size = int(bytes(received.part(start, end)), 16)
            start = end + 2 + size
            await received.until(start + 2)
            chunks.append(bytes(received.part(end + 2, start)))
            start += 2
            if not size:
                return status, b"".join(chunks)

    def close(self) -> None:
        if self._open is not None:
            self._open[0].close()
            self._open = None


class _Received(asyncio.BufferedProtocol):
    """What has come of an answer since ``begin``, in one piece; ``ended`` says that no more will come.

    17 MB take 8 ms of a processor, and took 21 by asyncio's streams.
    """

    def __init__(self) -> None:
        self.ended = False
        self._buffer = bytearray(_BUFFER_BYTES)
        self._filled = self._wanted = 0
        self._waiter: asyncio.Future[None] | None = None

    def begin(self) -> None:
        self._filled = 0

    def part(self, start: int, end: int) -> memoryview:
        """Return bytes that have come; they hold until ``begin``."""
        return memoryview(self._buffer)[start:end]

    async def found(self, what: bytes, start: int) -> int:
        """Return where ``what`` is, at ``start`` or behind it; raises as ``until``."""
        while (found := self._buffer.find(what, start, self._filled)) < 0:
            await self.until(self._filled + 1)
        return found

    async def until(self, size: int) -> None:
        """Wait until so many bytes have come; raises ``OSError`` when the connection ends before."""
        if self._filled >= size:
            return
        if self.ended:
            raise ConnectionResetError("it ended before its answer did")
        if size > len(self._buffer):
            self._grow(size)
        self._wanted, self._waiter = size, asyncio.get_running_loop().create_future()
        await self._waiter

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._filled == len(self._buffer):
            self._grow(2 * self._filled)
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._waiter is not None and self._filled >= self._wanted:
            self._waiter.set_result(None)
            self._waiter = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        if self._waiter is not None:
            self._waiter.set_exception(exc or ConnectionResetError("it ended before its answer did"))
            self._waiter = None

    def _grow(self, size: int) -> None:
        # A new one: a part of this one may be in use.
        grown = bytearray(size)
        grown[: self._filled] = memoryview(self._buffer)[: self._filled]
        self._buffer = grown
