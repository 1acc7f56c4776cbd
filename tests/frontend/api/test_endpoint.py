"""Bodies that are slow, too large, compressed or cut off, over real connections."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from tessera.errors import TesseraError
from tessera.frontend.api.endpoint import read_body
from tessera.frontend.exchange import Exchange
from tessera.frontend.http.connection import ConnectionLimits
from tessera.frontend.http.errors import failure_response, render
from tessera.frontend.http.server import HttpServer
from tests.waiting import until

LIMIT = 1000
SECONDS = 0.3


class Reading:
    """A server that reads bodies; ``errors`` are those it could not read."""

    def __init__(self) -> None:
        self.limit, self.seconds = LIMIT, SECONDS
        self.errors: list[TesseraError] = []
        app = FastAPI()

        @app.post("/")
        async def read(request: Request) -> Response:
            Exchange.open(request.scope)
            try:
                return Response(await read_body(request, limit=self.limit, timeout=self.seconds))
            except TesseraError as error:
                self.errors.append(error)
                return failure_response(render(error))

        limits = ConnectionLimits(header_seconds=10.0, header_bytes=4096, keep_alive_seconds=5.0)
        self.server = HttpServer(app, host="127.0.0.1", port=0, drain_seconds=1, limits=limits)
        self.task = asyncio.ensure_future(self.server.serve())

    async def send(self, headers: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        await until(lambda: self.server.started)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n\r\n".encode() + body)
        return reader, writer

    async def ask(self, headers: str, body: bytes) -> tuple[int, bytes]:
        """The answer's status and body; the request need not be whole."""
        reader, writer = await self.send(headers, body)
        try:
            head, _, answer = (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n\r\n")
            return int(head.split()[1]), answer
        finally:
            writer.close()


@pytest.fixture
async def reading() -> AsyncIterator[Reading]:
    made = Reading()
    yield made
    made.server.should_exit = True
    await made.task


async def test_a_whole_body(reading: Reading) -> None:
    assert await reading.ask("Content-Length: 5", b"hello") == (200, b"hello")
    chunked = b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
    assert await reading.ask("Transfer-Encoding: chunked", chunked) == (200, b"hello")
    assert await reading.ask("Content-Length: 5\r\nContent-Encoding: identity", b"hello") == (200, b"hello")


async def test_a_large_body_comes_as_it_was_sent(reading: Reading) -> None:
    reading.limit, reading.seconds = 4 << 20, 60.0
    sent = random.randbytes(3 << 20)
    assert await reading.ask(f"Content-Length: {len(sent)}", sent) == (200, sent)
    pieces = [sent[at : at + 100_000] for at in range(0, len(sent), 100_000)]
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    assert await reading.ask("Transfer-Encoding: chunked", chunked + b"0\r\n\r\n") == (200, sent)
    reading.limit = len(sent) - 1
    status, _ = await reading.ask("Transfer-Encoding: chunked", chunked)
    assert (status, reading.errors[0].code) == (413, "payload_too_large")


@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        ("Content-Length: 9", b"hello", 408, "request_timeout"),
        ("Transfer-Encoding: chunked", b"5\r\nhello\r\n", 408, "request_timeout"),
        ("Transfer-Encoding: chunked", b"ZZ\r\n", 400, "invalid_request"),
        ("Transfer-Encoding: chunked", b"5\r\nhello\r\nZZ\r\n", 400, "invalid_request"),
        ("Content-Length: 1001", b"", 413, "payload_too_large"),
        ("Transfer-Encoding: chunked", b"3e9\r\n" + bytes(1001) + b"\r\n", 413, "payload_too_large"),
        ("Content-Length: 99\r\nContent-Encoding: gzip", gzip.compress(bytes(10)), 415, "unsupported_media"),
        ("Content-Length: 99\r\nContent-Encoding: br, gzip", b"", 415, "unsupported_media"),
    ],
    ids=["slow", "slow chunks", "damaged", "damaged later", "announced", "chunks", "gzip", "several codings"],
)
async def test_refused(reading: Reading, headers: str, body: bytes, status: int, code: str) -> None:
    found, answer = await reading.ask(headers, body)
    assert (found, json.loads(answer)["error"]["code"]) == (status, code)


async def test_a_client_that_goes_away_while_it_sends(reading: Reading) -> None:
    _, writer = await reading.send("Content-Length: 9", b"hello")
    await writer.drain()
    writer.close()
    await until(lambda: reading.errors)
    assert reading.errors[0].code == "cancelled"


async def test_whoever_waits_for_100_gets_it_and_then_the_answer(reading: Reading) -> None:
    reader, writer = await reading.send("Content-Length: 5\r\nExpect: 100-continue", b"")
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"hello")
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\nhello")
    writer.close()


async def test_an_answer_without_a_body_comes_at_once(reading: Reading) -> None:
    reader, writer = await reading.send("Content-Length: 5", b"hello")
    await asyncio.wait_for(reader.read(), 60)
    writer.close()
    port = reading.server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert head.startswith(b"HTTP/1.1 405 ")
    writer.close()
