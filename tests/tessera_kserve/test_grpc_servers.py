"""The servers of a frontend on its gRPC port: none keeps another key waiting, and all end together."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from tessera_kserve import messages_pb2 as pb
from tests.e2e.service import free_ports
from tests.frontend.alone import Alone, frontend_process
from tests.waiting import until

pytestmark = [pytest.mark.service, pytest.mark.kserve]

KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789"}
FLOOD = 600
CONNECTIONS = 8
DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
ACK = END_STREAM = 1
END_HEADERS = 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">HBBBI", len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload


def empty_row() -> bytes:
    """Ask for the vector of a row that is empty, which needs no worker."""
    message = pb.ModelInferRequest(model_name="router")
    for name in ("input_ids", "attention_mask"):
        message.inputs.add(name=name, datatype="INT64", shape=[1, 1]).contents.int64_contents.append(0)
    return message.SerializeToString()


class Connection:
    """HTTP/2 in frames: with a client of gRPC nobody knows when a call has been sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.answered: list[int] = []
        self.leaving = False
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0))

    def begin(self, stream: int, method: str = "ModelInfer", key: str = "") -> None:
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": f"/inference.GRPCInferenceService/{method}",
            ":authority": "tessera",
            "te": "trailers",
            "content-type": "application/grpc",
            "authorization": f"Bearer {key}",
        }
        texts = [text.encode() for field in fields.items() for text in field]
        pairs = zip(texts[::2], texts[1::2], strict=True)
        head = b"".join(
            b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in pairs
        )
        self._writer.write(frame(HEADERS, END_HEADERS, stream, head))

    def send(self, stream: int, message: bytes) -> None:
        self._writer.write(frame(DATA, END_STREAM, stream, struct.pack(">BI", 0, len(message)) + message))

    async def read(self, answered: Callable[[], None]) -> None:
        """Read answers until the server closes the connection."""
        good: set[int] = set()
        while head := await self._reader.read(9):
            head += await self._reader.readexactly(9 - len(head))
            high, low, kind, flags, stream = struct.unpack(">HBBBI", head)
            payload = await self._reader.readexactly(high << 8 | low)
            if kind in (SETTINGS, PING) and not flags & ACK:
                self._writer.write(frame(kind, ACK, 0, payload if kind == PING else b""))
            elif kind == GOAWAY:
                self.leaving = True
            elif kind == DATA:
                good.add(stream)
            elif kind == HEADERS and flags & END_STREAM:
                assert stream in good, "a call has failed"
                self.answered.append(stream)
                answered()


@asynccontextmanager
async def connection(port: int, answered: Callable[[], None] = lambda: None) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    made = Connection(reader, writer)
    reading = asyncio.create_task(made.read(answered))
    try:
        yield made
    finally:
        reading.cancel()
        writer.close()
        await asyncio.gather(reading, return_exceptions=True)


async def answered_before(alone: Alone, port: int) -> int:
    """Return how many of the calls of one key are answered before another's, which came behind all."""
    answers: Counter[str] = Counter()
    before: list[int] = []
    async with AsyncExitStack() as stack:
        hers = [
            await stack.enter_async_context(connection(port, lambda: answers.update(["alice"])))
            for _ in range(CONNECTIONS)
        ]
        his = await stack.enter_async_context(connection(port, lambda: before.append(answers["alice"])))
        # All have come when it goes on.
        os.kill(alone.process.pid, signal.SIGSTOP)
        try:
            for number in range(FLOOD):
                stream = 2 * (number // CONNECTIONS) + 1
                hers[number % CONNECTIONS].begin(stream, key=KEYS["alice"])
                hers[number % CONNECTIONS].send(stream, empty_row())
            his.begin(1, key=KEYS["bob"])
            his.send(1, empty_row())
        finally:
            os.kill(alone.process.pid, signal.SIGCONT)
        await until(lambda: answers["alice"] == FLOOD and before)
    return before[0]


async def test_a_call_does_not_wait_for_all_of_another_key(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"TESSERA_API_KEYS": ", ".join(f"{key} {name}" for name, key in KEYS.items())}
    (port,) = free_ports(1)
    with frontend_process(checkpoint, tmp_path, "--grpc-port", str(port), environment=settings) as alone:
        # His connection may be one server's with some of hers.
        before = [await answered_before(alone, port) for _ in range(4)]
    assert max(before) < FLOOD // 3, before


async def test_calls_of_all_servers_end_before_the_frontend_does(checkpoint: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with frontend_process(checkpoint, tmp_path, "--grpc-port", str(port)) as alone:
        async with AsyncExitStack() as stack:
            held = [await stack.enter_async_context(connection(port)) for _ in range(2 * CONNECTIONS)]
            for one in held:
                one.begin(1)
                # Of a connection the calls are accepted in order.
                one.begin(3, "ServerLive")
                one.send(3, b"")
            await until(lambda: all(one.answered == [3] for one in held))
            alone.process.send_signal(signal.SIGTERM)
            await until(lambda: all(one.leaving for one in held), process=alone.process)
            for one in held:
                one.send(1, empty_row())
            await until(lambda: all(one.answered == [3, 1] for one in held))


@contextmanager
def taken(shared: bool) -> Iterator[int]:
    """Listen on a port, for this socket alone or for all of this user's that share it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_a_port_that_is_taken_is_refused(checkpoint: Path, tmp_path: Path, shared: bool) -> None:
    with taken(shared) as port:
        words = ["-m", "tessera.frontend", "--model-path", str(checkpoint), "--grpc-port", str(port)]
        ended = subprocess.run(
            [sys.executable, *words, "--port", str(free_ports(1)[0]), "--worker-wait-seconds", "0"],
            env=os.environ | {"DYN_FILE_KV": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=180,
        )
    assert ended.returncode == 1
    assert f"--grpc-port: cannot listen on 127.0.0.1:{port}: " in ended.stderr
