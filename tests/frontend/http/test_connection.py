"""Clients that send their head slowly, or too much of it, or do not read: real sockets to a real server."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop
from fastapi import FastAPI
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tessera.errors import RequestError
from tessera.frontend.http import connection
from tessera.frontend.http import server as http_server
from tessera.frontend.http.auth import Authenticator, read_keys
from tessera.frontend.http.connection import Answer, ConnectionLimits, GuardedProtocol
from tessera.frontend.http.errors import failure_response, render
from tessera.frontend.http.server import HttpServer
from tessera.frontend.http.tls import Certificate
from tessera.turns import Rounds
from tests.waiting import until

LIMITS = ConnectionLimits(header_seconds=0.5, header_bytes=4096, keep_alive_seconds=5.0, write_seconds=1.0)
LARGE = 64 << 20


class Running:
    def __init__(self, limits: ConnectionLimits, certificate: Certificate | None = None) -> None:
        app = FastAPI()
        # Whether requests for /echo are refused by their heads.
        self.full = False
        self.large = 0

        @app.post("/echo")
        async def echo(request: Request) -> Response:
            try:
                return Response(str(len(await request.body())))
            except RequestError as error:
                return failure_response(render(error))

        @app.get("/large")
        async def large() -> Response:
            self.large += 1
            return Response(bytes(LARGE))

        @app.get("/small")
        async def small() -> Response:
            return Response("small")

        @app.get("/slow")
        async def slow() -> Response:
            await asyncio.sleep(1.2)
            return Response("done")

        def refuse(scope: Scope) -> Answer | None:
            if not self.full or scope["path"] != "/echo":
                return None
            return Answer(429, [(b"content-length", b"4")], b"full")

        self.server = HttpServer(
            app,
            host="127.0.0.1",
            port=0,
            drain_seconds=1,
            limits=limits,
            certificate=certificate,
            refuse=refuse,
            keys=Authenticator(read_keys(None, "sk-alice-0123456789 alice, sk-bob-0123456789 bob")),
        )
        self.task = asyncio.ensure_future(self.server.serve())

    @property
    def port(self) -> int:
        sockets = self.server.ports[0].sockets if self.server.ports else self.server.servers[0].sockets
        return int(sockets[0].getsockname()[1])

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        await until(lambda: self.server.started)
        return await asyncio.open_connection("127.0.0.1", self.port)


@asynccontextmanager
async def served(limits: ConnectionLimits, certificate: Certificate | None = None) -> AsyncIterator[Running]:
    made = Running(limits, certificate)
    try:
        yield made
    finally:
        made.server.should_exit = True
        await made.task


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with served(LIMITS) as made:
        yield made


@pytest.fixture
async def patient() -> AsyncIterator[Running]:
    """For heads that take their time on a busy machine."""
    async with served(replace(LIMITS, header_seconds=30.0)) as made:
        yield made


def refusal(raw: bytes) -> tuple[int, dict[str, str], str]:
    """Status, OpenAI's error object, request id."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert headers["connection"] == "close"
    assert int(headers["content-length"]) == len(body)
    return int(status.split()[1]), json.loads(body)["error"], headers["x-request-id"]


@pytest.mark.parametrize("start", [b"", b"POST /echo HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_a_head_that_never_ends(running: Running, start: bytes) -> None:
    await until(lambda: running.server.started)
    earlier = asyncio.ensure_future(asyncio.sleep(LIMITS.header_seconds / 2))
    reader, writer = await running.connect()

    async def trickle() -> None:
        writer.write(start)
        while start and not writer.is_closing():
            writer.write(b"a")
            await asyncio.sleep(0.05)

    dripping = asyncio.ensure_future(trickle())
    raw = await asyncio.wait_for(reader.read(), 60)
    dripping.cancel()
    status, error, request_id = refusal(raw)
    assert (status, error["code"], len(request_id)) == (408, "request_timeout", 32)
    assert earlier.done()
    writer.close()


async def test_many_slow_clients_do_not_keep_others_out(running: Running) -> None:
    slow = []
    for _ in range(200):
        slow.append(await running.connect())
        slow[-1][1].write(b"GET /slow HTTP/1.1\r\nA: b")
    reader, writer = await running.connect()
    writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")
    assert (await asyncio.wait_for(reader.read(), 60)).endswith(b"2")
    writer.close()
    for reader, writer in slow:
        assert refusal(await asyncio.wait_for(reader.read(), 60))[0] == 408
        writer.close()
    await until(lambda: not running.server.server_state.connections)


async def test_more_connections_than_descriptors_are_refused(
    patient: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "max_connections", lambda: 4)
    # All of them are there at once, however long it takes to make them.
    monkeypatch.setattr(connection, "_LINGER_SECONDS", 30.0)
    open_ones = [await patient.connect() for _ in range(4)]
    await until(lambda: len(patient.server.server_state.connections) == 4)
    refused = [await patient.connect() for _ in range(200)]
    answers = await asyncio.gather(*(reader.read() for reader, _ in refused), return_exceptions=True)
    told = [refusal(raw) for raw in answers if raw and isinstance(raw, bytes)]
    # Those whose answers the rest would have waited behind are cut off.
    assert 0 < len(told) < len(answers)
    assert {(status, error["code"]) for status, error, _ in told} == {(503, "overloaded")}
    for reader, writer in open_ones:
        writer.write(SMALL)
        assert await reader.readuntil(b"small")
    for _, writer in (*refused, *open_ones):
        writer.close()
    await until(lambda: not patient.server.server_state.connections)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"a" * 50) for n in range(100)) + b"\r\n",
    ],
    ids=["url", "one header", "many headers"],
)
@pytest.mark.parametrize("piece", [100_000, 700])
async def test_a_head_that_is_too_large(patient: Running, head: bytes, piece: int) -> None:
    reader, writer = await patient.connect()
    for start in range(0, len(head), piece):
        writer.write(head[start : start + piece])
        await asyncio.sleep(0.01)
    status, error, _ = refusal(await asyncio.wait_for(reader.read(), 60))
    assert (status, error["code"]) == (431, "header_too_large")
    writer.close()


async def test_no_http_at_all(running: Running) -> None:
    reader, writer = await running.connect()
    writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    status, error, _ = refusal(await asyncio.wait_for(reader.read(), 60))
    assert (status, error["type"]) == (400, "invalid_request_error")
    writer.close()


async def test_large_bodies_and_kept_connections_are_no_heads(running: Running) -> None:
    reader, writer = await running.connect()
    for _ in range(3):
        writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + bytes(100_000))
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(6) == b"100000"
        await asyncio.sleep(0.7)
    writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n")
    assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    assert await reader.readexactly(4) == b"done"
    writer.close()


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
A_REQUEST = (
    b"POST /echo HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: upgrade\r\nContent-Length: 1\r\n\r\nx"
)


def counted(body: bytes, offer: bytes = OFFER) -> tuple[bytes, bytes]:
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n"
    return head % (offer, len(body)), body


def chunked(*chunks: bytes) -> tuple[bytes, bytes]:
    coded = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
    return b"POST /echo HTTP/1.1\r\nHost: x\r\n%sTransfer-Encoding: chunked\r\n\r\n" % OFFER, coded


UPGRADES = {
    "counted": (*counted(b"hello"), 5),
    "a body that is a request": (*counted(A_REQUEST), len(A_REQUEST)),
    "a body that spells a header": (*counted(b"\r\nUpgrade: h2c\r\n\r\n"), 18),
    "chunked": (*chunked(b"hello", b" ", A_REQUEST), 6 + len(A_REQUEST)),
    "no body": (b"POST /echo HTTP/1.1\r\nHost: x\r\n" + OFFER + b"\r\n", b"", 0),
    "in other letters": (
        *counted(
            b"hello", b"CONNECTION:keep-alive\r\nEmpty:\r\nuPGRADE:\tx/1,y\r\nConnection: foo,UPGRADE\r\n"
        ),
        5,
    ),
    "before HTTP/1.1": (b"POST /echo HTTP/1.0\r\n" + OFFER + b"Content-Length: 2\r\n\r\n", b"hi", 2),
}


async def answers(reader: asyncio.StreamReader) -> list[tuple[int, bytes]]:
    """Status and body of everything that comes until the server closes."""
    found = []
    rest = await asyncio.wait_for(reader.read(), 60)
    while rest:
        head, _, rest = rest.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
        found.append((int(lines[0].split()[1]), rest[:length]))
        rest = rest[length:]
    return found


@pytest.mark.parametrize("pieces", ["at once", "head first", "byte by byte"])
async def test_an_offer_to_upgrade_is_ignored(patient: Running, pieces: str) -> None:
    last = b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 3\r\n\r\nend"

    async def exchanged(head: bytes, body: bytes) -> list[tuple[int, bytes]]:
        whole = head + body
        if b"HTTP/1.1" in head:
            # One more of the same behind it, and another.
            whole += whole + last
        reader, writer = await patient.connect()
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        match pieces:
            case "at once":
                sent = [whole]
            case "head first":
                sent = [head, whole[len(head) :]]
            case _:
                sent = [whole[at : at + 1] for at in range(len(whole))]
        for piece in sent:
            writer.write(piece)
            await asyncio.sleep(0.05 if len(sent) == 2 else 0)
        found = await answers(reader)
        writer.close()
        return found

    exchanges = [exchanged(head, body) for head, body, _ in UPGRADES.values()]
    for name, found in zip(UPGRADES, await asyncio.gather(*exchanges), strict=True):
        once = (200, b"%d" % UPGRADES[name][2])
        assert found == ([once] if "before" in name else [once, once, (200, b"3")]), name


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_curl_offers_http_2(running: Running) -> None:
    _, writer = await running.connect()
    port = writer.get_extra_info("peername")[1]
    writer.close()
    url = f"http://127.0.0.1:{port}/echo"
    body = "x" * 100_000
    curl = await asyncio.create_subprocess_exec(
        *("curl", "--silent", "--show-error", "--http2", "--data-binary", "@-", url, "--next"),
        *("--silent", "--show-error", "--http2", "--data-binary", "hello", url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await asyncio.wait_for(curl.communicate(body.encode()), 60)
    assert (curl.returncode, out) == (0, b"1000005")


async def test_a_tunnel_is_refused(running: Running) -> None:
    reader, writer = await running.connect()
    writer.write(b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n" + A_REQUEST)
    status, error, _ = refusal(await asyncio.wait_for(reader.read(), 60))
    assert (status, error["code"]) == (405, "method_not_allowed")
    writer.close()


HOSTS = (
    (b"GET /small HTTP/1.1\r\n", 400),
    (b"GET /small HTTP/1.1\r\nHost: a\r\nX: y\r\nhost: b\r\n", 400),
    (b"GET /small HTTP/1.0\r\nHost: a\r\nHost: a\r\n", 400),
    (b"GET /small HTTP/1.1\r\nHost: a b\r\n", 400),
    (b"GET /small HTTP/1.1\r\nHost: a/b\r\n" + OFFER, 400),
    (b"GET /small HTTP/1.1\r\nHost:\r\nConnection: close\r\n", 200),
    (b"GET /small HTTP/1.1\r\nHost: [::1]:8000 \r\nConnection: close\r\n", 200),
    (b"GET /small HTTP/1.0\r\n", 200),
)


async def test_the_host(running: Running) -> None:
    # What was asked before is answered before.
    first = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi"
    for lines, status in HOSTS:
        reader, writer = await running.connect()
        writer.write(first + lines + b"\r\n" + first)
        found = await answers(reader)
        assert [code for code, _ in found] == [200, status], lines
        if status == 400:
            assert "Host header" in json.loads(found[1][1])["error"]["message"]
        writer.close()


async def test_a_damaged_body_ends_what_is_read(running: Running) -> None:
    first = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi"
    damaged = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\nZZ\r\n"
    for path, expected in ((b"/echo", 400), (b"/small", 405)):
        reader, writer = await running.connect()
        # Behind another one and at once, then while it is read or after its answer.
        writer.write(first + damaged % path + first)
        assert [code for code, _ in await answers(reader)] == [200, expected]
        writer.close()
        reader, writer = await running.connect()
        whole = damaged % path
        writer.write(whole[:-4])
        await asyncio.sleep(0.05)
        writer.write(whole[-4:] + first)
        assert [code for code, _ in await answers(reader)] == [expected]
        writer.close()


async def test_a_trailer_that_is_too_large(running: Running) -> None:
    # As much of it is fine where some of the body stands between.
    chunks = b"".join(b"1;%s\r\na\r\n" % (b"x" * 90) for _ in range(100))
    for path, expected in ((b"/echo", 400), (b"/small", 405)):
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path
        long = b"X: " + b"a" * 5000
        many = b"".join(b"X-%d: %s\r\n" % (n, b"a" * 50) for n in range(100))
        for coded in (chunks + b"0\r\n" + long, chunks + b"0\r\n" + many, b"1;" + b"a" * 5000):
            reader, writer = await running.connect()
            for start in range(0, len(head + coded), 700):
                writer.write((head + coded)[start : start + 700])
                await asyncio.sleep(0.001)
            found = await answers(reader)
            assert [code for code, _ in found] == [expected], coded[-20:]
            if expected == 400:
                assert "trailer" in json.loads(found[0][1])["error"]["message"]
            writer.close()


SMALL = b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_a_connection_waits_for_its_next_request_and_no_longer() -> None:
    async with served(replace(LIMITS, keep_alive_seconds=3.0)) as running:
        reader, writer = await running.connect()
        for _ in range(3):
            writer.write(SMALL)
            assert (await reader.readuntil(b"small")).startswith(b"HTTP/1.1 200 ")
            # Longer together than it waits for one.
            await asyncio.sleep(1.1)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


async def test_a_client_that_has_read_a_long_answer_has_its_time_for_the_next_request() -> None:
    """The answer was written at once, and is read for longer than the connection waits for a request."""
    async with served(replace(LIMITS, keep_alive_seconds=1.5, write_seconds=60.0)) as running:
        reader, writer = await running.connect()
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(2.5)
        await asyncio.wait_for(reader.readexactly(LARGE), 60)
        writer.write(SMALL)
        assert (await asyncio.wait_for(reader.readuntil(b"small"), 60)).startswith(b"HTTP/1.1 200 ")
        # It waits no longer for all that.
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


async def test_what_comes_behind_an_answer_is_no_reason_to_wait() -> None:
    async with served(replace(LIMITS, keep_alive_seconds=1.0)) as running:
        _, writer = await running.connect()
        writer.write(b"POST /small HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")

        async def trickle() -> None:
            while not writer.is_closing():
                writer.write(b"a")
                await asyncio.sleep(0.05)

        dripping = asyncio.ensure_future(trickle())
        await until(lambda: running.server.server_state.total_requests == 1)
        await until(lambda: not running.server.server_state.connections)
        dripping.cancel()
        writer.close()


def test_what_came_before_the_server_leaves_is_answered() -> None:
    """On the frontend's own loop: what it has not read yet when it is told to leave."""

    async def ask() -> bytes:
        async with served(LIMITS) as running:
            reader, writer = await running.connect()
            writer.write(SMALL)
            await reader.readuntil(b"small")
            # Past the asyncio transport: it is with the server now, which learns of it when the loop goes on.
            os.write(writer.get_extra_info("socket").fileno(), SMALL)
            running.server.should_exit = True
            for connection in running.server.server_state.connections:
                connection.shutdown()
            answer = await asyncio.wait_for(reader.readuntil(b"small"), 60)
            writer.close()
            return answer

    answer = uvloop.run(ask())
    assert answer.startswith(b"HTTP/1.1 200 ") and b"connection: close" in answer


async def test_idle_connections_do_not_keep_the_server_from_leaving() -> None:
    running = Running(replace(LIMITS, header_seconds=60.0, keep_alive_seconds=60.0))
    fresh = await running.connect()
    used = await running.connect()
    used[1].write(SMALL)
    await used[0].readuntil(b"small")
    running.server.should_exit = True
    for reader, writer in (fresh, used):
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
    await asyncio.wait_for(running.task, 60)


async def test_a_client_that_does_not_read_is_cut_off(running: Running) -> None:
    _, first = await running.connect()
    port = first.get_extra_info("peername")[1]
    first.close()
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(stuck.connect, ("127.0.0.1", port))
        stuck.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: running.large > 0)
        await until(lambda: not running.server.server_state.connections)


async def test_a_client_that_reads_slowly_gets_everything(running: Running) -> None:
    reader, writer = await running.connect()
    writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    received = reads = 0
    while chunk := await reader.read(1 << 20):
        received += len(chunk)
        reads += 1
        if reads < 30:
            # Some 600 KB a second for two seconds: less than it could be, and more than nothing.
            await asyncio.sleep(0.1)
    assert received > LARGE
    writer.close()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode()
    status, *lines = head.strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    body = await asyncio.wait_for(reader.readexactly(int(headers["content-length"])), 60)
    return int(status.split()[1]), headers, body


def echo(size: int, *more: bytes) -> bytes:
    lines = [b"POST /echo HTTP/1.1", b"Host: x", b"Content-Length: %d" % size, *more]
    return b"\r\n".join((*lines, b"", b""))


async def test_a_request_that_is_refused_by_its_head_leaves_the_connection_as_it_was(
    patient: Running,
) -> None:
    reader, writer = await patient.connect()
    for turn in range(3):
        patient.full = True
        # Its head alone first: the answer waits for no body.
        writer.write(echo(300_000))
        status, headers, body = await answer_of(reader)
        assert (status, body) == (429, b"full") and "date" in headers and "connection" not in headers, turn
        writer.write(bytes(100_000))
        await writer.drain()
        writer.write(bytes(200_000) + echo(5) + b"12345")
        assert (await answer_of(reader))[0] == 429
        patient.full = False
        writer.write(echo(7) + b"1234567")
        assert (await answer_of(reader))[::2] == (200, b"7")
    patient.full = True
    head = echo(3)
    writer.write(head[:20])
    await asyncio.sleep(0.05)
    writer.write(head[20:] + b"123")
    assert (await answer_of(reader))[::2] == (429, b"full")
    # Of a client that waits, behind another one, or as the last one, a request is left to the application.
    writer.write(echo(3, b"Expect: 100-continue"))
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"123")
    assert (await answer_of(reader))[::2] == (200, b"3")
    writer.write(b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n" + (echo(3) + b"123") * 3)
    assert (await answer_of(reader))[::2] == (200, b"small")
    statuses = [(await answer_of(reader))[0] for _ in range(3)]
    assert set(statuses) <= {200, 429}
    writer.write(echo(3, b"Connection: close") + b"123")
    status, headers, body = await answer_of(reader)
    assert (status, headers["connection"], body) == (200, "close", b"3")
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


async def test_a_connection_on_which_a_request_was_refused_by_its_head_ends_when_it_idles() -> None:
    async with served(replace(LIMITS, keep_alive_seconds=0.3)) as running:
        running.full = True
        reader, writer = await running.connect()
        writer.write(echo(3) + b"123")
        assert (await answer_of(reader))[0] == 429
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


async def test_a_body_that_is_damaged_after_its_refusal_ends_the_connection(patient: Running) -> None:
    patient.full = True
    reader, writer = await patient.connect()
    writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n")
    assert (await answer_of(reader))[0] == 429
    writer.write(b"no size\r\n")
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


async def rounds_of(work: asyncio.Task[object]) -> int:
    """Count the rounds of the event loop until a task is done."""
    rounds = 0
    while not work.done():
        await asyncio.sleep(0)
        rounds += 1
    return rounds


@pytest.fixture
async def long_heads() -> AsyncIterator[Running]:
    """With the limits of time and size that a service has."""
    async with served(ConnectionLimits()) as made:
        yield made


async def test_chunks_of_a_byte_leave_others_their_turns(long_heads: Running) -> None:
    count = 60_000
    body = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    body += b"1\r\nx\r\n" * count + b"0\r\n\r\n"

    async def send() -> bytes:
        reader, writer = await long_heads.connect()
        writer.write(body)
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return answer

    sending = asyncio.gather(*(send() for _ in range(3)))
    rounds = await rounds_of(asyncio.ensure_future(sending))
    assert all(answer.endswith(b"%d" % count) for answer in await sending)
    # In each of them at most as many as 4 KiB hold are read of one connection.
    assert rounds > 3 * count // 700


async def test_a_connection_waits_for_one_round_at_a_time(
    long_heads: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an answer is ready while the rest of its body waits for its round."""
    longest, count = 0, 40
    wait = Rounds.wait

    def counted(
        rounds: Rounds, loop: asyncio.AbstractEventLoop, work: Callable[[], None], client: str
    ) -> None:
        nonlocal longest
        wait(rounds, loop, work, client)
        longest = max(longest, sum(map(len, rounds._waiting.values())))

    monkeypatch.setattr(Rounds, "wait", counted)
    reader, writer = await long_heads.connect()
    head = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    body = b"1\r\nx\r\n" * 2000 + b"0\r\n\r\n"
    writer.write((head + b"\r\n" + body) * (count - 1) + head + b"Connection: close\r\n\r\n" + body)
    assert [status for status, _ in await answers(reader)] == [404] * count
    assert longest == 1
    writer.close()


async def test_of_requests_behind_each_other_one_begins_in_a_round(long_heads: Running) -> None:
    """However many connections there are: one of each in a round kept another key's texts for 0.8 s."""
    connections, count = 30, 30

    async def send() -> list[tuple[int, bytes]]:
        reader, writer = await long_heads.connect()
        last = SMALL.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        writer.write(SMALL * (count - 1) + last)
        found = await answers(reader)
        writer.close()
        return found

    sending = asyncio.gather(*(send() for _ in range(connections)))
    rounds = await rounds_of(asyncio.ensure_future(sending))
    assert await sending == [[(200, b"small")] * count] * connections
    # The first of each connection begins as it comes.
    assert rounds >= connections * (count - 1)


async def test_requests_behind_each_other_begin_in_turns_of_keys(
    long_heads: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, waited = 20, Counter[str]()
    wait = Rounds.wait

    def counted(
        rounds: Rounds, loop: asyncio.AbstractEventLoop, work: Callable[[], None], client: str
    ) -> None:
        waited[client] += 1
        wait(rounds, loop, work, client)

    monkeypatch.setattr(Rounds, "wait", counted)
    for key in (b"sk-alice-0123456789", b"sk-bob-0123456789", b"sk-nobody-0123456789"):
        reader, writer = await long_heads.connect()
        head = SMALL.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer %s\r\n" % key)
        writer.write((head + b"\r\n") * (count - 1) + head + b"Connection: close\r\n\r\n")
        assert await answers(reader) == [(200, b"small")] * count
        writer.close()
    assert waited.keys() == {"key alice", "key bob", "127.0.0.1"}
    # Those that came in one read at least, and what was not parsed in it.
    assert min(waited.values()) >= count - 1


async def test_of_requests_that_come_together_some_begin_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a key with many come behind one that has few: 600 kept the loop for 0.2 s."""
    count, begun, most = 200, list[bool](), 0
    answered_at_once = GuardedProtocol._answered_at_once

    def counted(protocol: GuardedProtocol, cycle: RequestResponseCycle) -> bool:
        # The first that is asked of a request that begins.
        begun.append(any(name == b"authorization" for name, _ in cycle.scope["headers"]))
        return answered_at_once(protocol, cycle)

    monkeypatch.setattr(GuardedProtocol, "_answered_at_once", counted)
    close = SMALL.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    keyed = close.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer sk-alice-0123456789\r\n\r\n")
    async with served(ConnectionLimits()) as running:
        connections = [await running.connect() for _ in range(count + 1)]
        await until(lambda: len(running.server.server_state.connections) == count + 1)
        for number, (_, writer) in enumerate(connections):
            writer.write(close if number == count else keyed)
        while len(begun) <= count:
            before = len(begun)
            await asyncio.sleep(0)
            most = max(most, len(begun) - before)
        for reader, writer in connections:
            assert await answers(reader) == [(200, b"small")]
            writer.close()
    # Those of a round that need no turn, and one that has its turn.
    assert most <= 33
    assert begun.index(False) < count // 2


def some_request(chance: random.Random, *, last: bool) -> tuple[bytes, bytes]:
    """Return a request of whatever kind, and its answer's body."""
    fields = b"Host: x\r\n" + b"Connection: close\r\n" * last
    key = b"Authorization: Bearer sk-alice-0123456789\r\n"
    fields += chance.choice((b"", key, b"Expect: 100-continue\r\n"))
    size = chance.choice((0, 1, 4000, 5000, 70_000, 300_000))
    if chance.random() < 0.4 or b"Expect" in fields:
        return b"GET /small HTTP/1.1\r\n" + fields + b"\r\n", b"small"
    post, answer = b"POST /echo HTTP/1.1\r\n" + fields, str(size).encode()
    if chance.random() < 0.5:
        return post + b"Content-Length: %d\r\n\r\n" % size + bytes(size), answer
    chunk = chance.choice((7, 1000)) if size < 10_000 else 60_000
    sizes = [min(chunk, size - at) for at in range(0, size, chunk)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (each, bytes(each)) for each in (*sizes, 0))
    return post + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, answer


@pytest.mark.parametrize("at_once", [0, 1, 32])
async def test_requests_are_answered_in_order_whatever_waits(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Bodies larger than what is read at once, in pieces of any size, behind requests that wait."""
    monkeypatch.setattr(connection, "_AT_ONCE", at_once)

    async def ask(running: Running, seed: int) -> None:
        chance = random.Random(seed)
        count = chance.randint(1, 8)
        asked = [some_request(chance, last=number == count - 1) for number in range(count)]
        data = b"".join(request for request, _ in asked)
        reader, writer = await running.connect()
        answered = asyncio.ensure_future(answers(reader))
        while data:
            size = chance.choice((1, 50, 4096, 70_000, len(data)))
            writer.write(data[:size])
            data = data[size:]
            if chance.random() < 0.2:
                await asyncio.sleep(0)
        assert await answered == [(200, body) for _, body in asked]
        writer.close()

    async with served(ConnectionLimits()) as running:
        await asyncio.gather(*(ask(running, seed) for seed in range(60)))
        state = running.server.server_state
        await until(lambda: not state.connections and not state.tasks)


async def test_who_leaves_behind_many_requests_leaves_nothing(long_heads: Running) -> None:
    _, writer = await long_heads.connect()
    writer.write(SMALL * 3000)
    connections = long_heads.server.server_state.connections
    await until(lambda: any(one.pipeline for one in connections))  # type: ignore[union-attr]
    writer.transport.abort()
    await until(lambda: not connections and not long_heads.server.server_state.tasks)
    reader, writer = await long_heads.connect()
    writer.write(SMALL.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert await answers(reader) == [(200, b"small")]
    writer.close()


@pytest.mark.parametrize("more", [b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])
async def test_thousands_of_requests_that_come_together_are_answered_in_order(
    long_heads: Running, more: bytes
) -> None:
    count = 3000
    reader, writer = await long_heads.connect()
    ask = b"POST /echo HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s"
    for number in range(count):
        writer.write(ask % (more, number % 10, b"x" * (number % 10)))
    writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 20000\r\n\r\n")
    writer.write(b"x" * 20_000)
    deepest = 0

    async def watch() -> None:
        nonlocal deepest
        while True:
            for one in long_heads.server.server_state.connections:
                deepest = max(deepest, len(one.pipeline))  # type: ignore[union-attr]
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    found = await answers(reader)
    watching.cancel()
    assert found == [*((200, b"%d" % (number % 10)) for number in range(count)), (200, b"20000")]
    assert 0 < deepest < 200
    writer.close()
    await until(lambda: not long_heads.server.server_state.connections)


async def test_thousands_of_fields_are_a_large_head(long_heads: Running) -> None:
    reader, writer = await long_heads.connect()
    writer.write(b"GET /small HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * 5000 + b"\r\n")
    assert refusal(await asyncio.wait_for(reader.read(), 60))[0] == 431
    writer.close()
    # More than are read in one round.
    reader, writer = await long_heads.connect()
    writer.write(b"GET /small HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + b"a:b\r\n" * 1500 + b"\r\n")
    assert (await asyncio.wait_for(reader.read(), 60)).endswith(b"small")
    writer.close()


async def test_extensions_of_chunks_leave_others_their_turns(long_heads: Running) -> None:
    count = 200
    reader, writer = await long_heads.connect()
    writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
    writer.write((b"1;" + b"a" * 60_000 + b"\r\nx\r\n") * count + b"0\r\n\r\n")
    reading = asyncio.ensure_future(reader.read())
    rounds = await rounds_of(reading)
    assert (await reading).endswith(b"%d" % count)
    assert rounds > count // 8
    writer.close()


async def most_of_a_round(head: bytes, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the most bytes that a server reads in one round from 8 clients that have their answers."""
    received = most = total = sent = 0
    receive = GuardedProtocol.data_received

    def counted(protocol: GuardedProtocol, data: bytes) -> None:
        nonlocal received
        received += len(data)
        receive(protocol, data)

    # Before there are connections, which keep what they call.
    monkeypatch.setattr(GuardedProtocol, "data_received", counted)
    async with served(ConnectionLimits()) as running:
        running.full = True
        connections = [await running.connect() for _ in range(8)]
        for reader, writer in connections:
            writer.write(head)
            assert (await reader.readuntil(b"\r\n\r\n")).split()[1] in (b"400", b"429")
        for _, writer in connections:
            with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as client:
                client.setblocking(False)
                with suppress(BlockingIOError):
                    while True:
                        sent += client.send(bytes(1 << 20))
        # Those of a refused head end after a second, whatever has been read.
        while total < sent and running.server.server_state.connections:
            received = 0
            await asyncio.sleep(0)
            total, most = total + received, max(most, received)
        for _, writer in connections:
            writer.close()
    return most


@pytest.mark.parametrize("head", [echo(64 << 20), b"no head\r\n\r\n"], ids=["refused", "no HTTP"])
def test_what_nobody_reads_leaves_others_their_turns(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of each connection, then of one in each round: the loop would read 8 MB of each at once."""
    assert 0 < uvloop.run(most_of_a_round(head, monkeypatch)) <= 8 * 256_000


async def test_an_answer_is_being_sent_until_it_is_read(running: Running) -> None:
    reader, writer = await running.connect()
    writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    await until(lambda: running.large == 1)
    assert await reader.readuntil(b"\r\n\r\n")
    tasks = running.server.server_state.tasks
    assert len(tasks) == 1
    assert len(await asyncio.wait_for(reader.readexactly(LARGE), 60)) == LARGE
    await until(lambda: not tasks)
    writer.close()


async def test_what_nobody_reads_waits_for_its_turn_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SKIPPING_SECONDS", 3600.0)
    # A route that takes no POST, and a head that is refused: nothing of either is read.
    head = b"POST /small HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % LARGE
    for refused in (head, b"nothing of HTTP\r\n\r\n"):
        async with served(ConnectionLimits()) as running:
            reader, writer = await running.connect()
            writer.write(refused)
            await reader.readuntil(b"\r\n\r\n")
            (held,) = running.server.server_state.connections
            writer.write(bytes(LARGE))
            await until(lambda held=held: held.flow.read_paused)  # type: ignore[misc, union-attr]
            other, asking = await running.connect()
            asking.write(SMALL.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            assert [status for status, _ in await answers(other)] == [200]
            asking.close()
            writer.transport.abort()


async def test_what_nobody_reads_is_skipped_in_turns_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MiB of a key waited 45 s behind 600 bodies without end, and their client sees no answer before."""
    count, turns = 30, Counter[str]()
    skip_more = GuardedProtocol._skip_more

    def counted(protocol: GuardedProtocol) -> None:
        turns[protocol._client()] += 1
        skip_more(protocol)

    monkeypatch.setattr(GuardedProtocol, "_skip_more", counted)
    head = b"POST /small HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-%s-0123456789\r\n"
    head += b"Content-Length: %d\r\n\r\n"
    async with served(ConnectionLimits()) as running:
        endless = [await running.connect() for _ in range(count)]
        for _, writer in endless:
            writer.write(head % (b"alice", 1 << 40) + bytes(4 << 20))
        await until(lambda: turns["key alice"] > count)
        turns.clear()
        reader, writer = await running.connect()
        size = 2 << 20
        writer.write(head % (b"bob", size) + bytes(size))
        writer.write(SMALL.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert [status for status, _ in await answers(reader)] == [405, 200]
        assert turns["key bob"] >= size // 256_000 - 1
        assert turns["key alice"] < 6 * turns["key bob"]
        for _, left in (*endless, (reader, writer)):
            left.transport.abort()


async def test_a_refused_body_without_end_ends_with_its_connection() -> None:
    async with served(ConnectionLimits(keep_alive_seconds=0.5)) as running:
        reader, writer = await running.connect()
        writer.write(b"POST /small HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (1 << 40))
        assert (await reader.readuntil(b"\r\n\r\n")).split()[1] == b"405"
        assert running.server.server_state.connections
        with suppress(ConnectionError):
            while True:
                writer.write(bytes(1 << 20))
                await asyncio.wait_for(writer.drain(), 60)
        await until(lambda: not running.server.server_state.connections)
        writer.transport.abort()


async def test_a_refused_body_is_skipped_to_its_end(long_heads: Running) -> None:
    size = 2 << 20
    last = SMALL.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")

    async def send() -> list[int]:
        reader, writer = await long_heads.connect()
        writer.write(b"POST /small HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
        writer.write(bytes(size) + last)
        found = await answers(reader)
        writer.close()
        return [status for status, _ in found]

    assert await asyncio.gather(*(send() for _ in range(8))) == [[405, 200]] * 8


async def test_an_old_client_gets_no_interim_answer(running: Running) -> None:
    head = b"POST /echo HTTP/%s\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    for version, begins in ((b"1.0", b"HTTP/1.1 200"), (b"1.1", b"HTTP/1.1 100")):
        reader, writer = await running.connect()
        writer.write(head % version)
        if version == b"1.0":
            writer.write(b"hi")
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)
        assert answer.startswith(begins)
        writer.close()
