"""Calls to a service in this process, by raw sockets, so that a client may hang up at any moment."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import numpy as np
from PIL import Image

from tessera_kserve import messages_pb2 as pb
from tests.cancellation.deployment import InProcess
from tests.e2e.service import MODEL

_numbers = itertools.count()


def picture() -> bytes:
    """One that was never sent before."""
    number = next(_numbers)
    pixels = np.random.default_rng(number).integers(0, 255, (40, 40, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def words(count: int = 5) -> str:
    """A text that was never sent before."""
    return f"number {next(_numbers)} " + "word " * count


def text() -> dict[str, Any]:
    return {"input": words()}


def texts() -> dict[str, Any]:
    return {"input": [words(100) for _ in range(4)]}


def image() -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(picture()).decode()
    return {
        "input": [
            [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": words()}],
            words(),
        ]
    }


def same_image() -> dict[str, Any]:
    """Two inputs with one image."""
    url = "data:image/png;base64," + base64.b64encode(picture()).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"input": [[part], [part, {"type": "text", "text": words()}]]}


def infer() -> dict[str, Any]:
    return {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [2, 1], "data": [words(), words()]}]}


def pairs() -> dict[str, Any]:
    return {"query": words(), "documents": [words(), words()]}


@contextmanager
def pictures() -> Iterator[str]:
    """A host of pictures on this machine, each new and slow in coming; its address."""

    class Pictures(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            data = picture()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(ConnectionError):
                for half in (data[: len(data) // 2], data[len(data) // 2 :]):
                    self.wfile.write(half)
                    time.sleep(0.005)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as host:
        host.daemon_threads = True
        thread = threading.Thread(target=host.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{host.server_port}"
        host.shutdown()


def remote(host: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": f"{host}/{next(_numbers)}"}} for _ in range(2)]
    return {"input": [[parts[0]], [parts[1], {"type": "text", "text": words()}]]}


@dataclass(slots=True)
class Post:
    """A request by HTTP; ``hang_up`` resets its connection."""

    at: InProcess
    path: str
    body: Callable[[], dict[str, Any]]
    headers: dict[str, str] = field(default_factory=dict)
    chunked: bool = False
    _socket: socket.socket | None = None

    async def ask(self) -> None:
        """Raises unless the answer is 200."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.at.port)
        self._socket = writer.get_extra_info("socket")
        try:
            writer.write(self._request())
            status = await reader.readline()
            rest = await reader.read()
            assert b" 200 " in status, status + rest
        finally:
            writer.close()

    def hang_up(self, _: object = None) -> None:
        if self._socket is not None and self._socket.fileno() >= 0:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._socket.shutdown(socket.SHUT_RDWR)

    def _request(self) -> bytes:
        data = json.dumps(self.body()).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        if not self.chunked:
            return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        halves = data[: len(data) // 2], data[len(data) // 2 :]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(half), half) for half in halves)
        return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"


@dataclass(slots=True)
class Infer:
    """A KServe call by gRPC, or a stream of some; ``hang_up`` cancels it."""

    at: InProcess
    calls: int = 1
    stream: bool = False
    _call: Any = None

    async def ask(self) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.at.grpc_port}") as channel:
            if self.stream:
                ask = channel.stream_stream(
                    "/inference.GRPCInferenceService/ModelStreamInfer",
                    pb.ModelInferRequest.SerializeToString,
                    pb.ModelStreamInferResponse.FromString,
                )
                self._call = ask(iter([_infer() for _ in range(self.calls)]))
                answers = [answer async for answer in self._call]
                assert len(answers) == self.calls and not any(one.error_message for one in answers), answers
            else:
                ask = channel.unary_unary(
                    "/inference.GRPCInferenceService/ModelInfer",
                    pb.ModelInferRequest.SerializeToString,
                    pb.ModelInferResponse.FromString,
                )
                self._call = ask(_infer())
                await self._call

    def hang_up(self, _: object = None) -> None:
        if self._call is not None:
            self._call.cancel()


def _infer() -> pb.ModelInferRequest:
    data = words().encode()
    made = pb.ModelInferRequest(model_name=MODEL, raw_input_contents=[len(data).to_bytes(4, "little") + data])
    made.inputs.add(name="text", datatype="BYTES", shape=[1, 1])
    return made
