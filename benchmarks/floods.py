"""What one key sends to keep a service from the others; each flood goes on until its process is killed."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import count, cycle
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import numpy as np
from PIL import Image

from tessera_kserve import messages_pb2 as pb

MIB: Final = 1 << 20
ALICE: Final = "sk-alice-0123456789"
"""The key that floods."""
_ALICE: Final = "alice"
BOB: Final = "bob"
"""The other key's owner, and the name of its region."""
SHORT: Final = "a short text"

_BODY_BYTES: Final = 60 * MIB
# Of gRPC: its limit, less a few bytes for what is around.
_MESSAGE_BYTES: Final = 32 * MIB - 100
_EMBEDDINGS: Final = "/v1/embeddings"
# Of somebody who is refused.
_PAUSE_SECONDS: Final = 0.02
# Longer than a text that is tokenised on a thread may be, and as long as an input may be.
_ACCENTS: Final = "e\u0301" * 1_900_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Names the ports of a frontend on this host, the model, and the port of a host of pictures.

    ``host`` is the name of the latter, in which a number may stand. ``answers`` counts those to the flood by
    status, 0 for none; processes share it. ``regions`` says that the other key's calls of KServe have regions
    of shared memory.
    """

    port: int
    grpc_port: int
    model: str
    pictures: int
    host: str = "127.0.0.1"
    answers: MutableSequence[int]
    regions: bool = False

    def ask(self, path: str, body: bytes) -> None:
        """Send a body whole and wait for its answer."""
        with _connect(self, path, len(body)) as connection:
            connection.sendall(body)
            self.answered(connection)

    def answered(self, connection: socket.socket) -> None:
        """Wait for an answer and count it."""
        head = connection.recv(64)
        self.answers[int(head[9:12] or 0)] += 1


Flood = Callable[[Target], Callable[[], None]]
"""Makes what is sent, and returns what sends it."""


def _connect(target: Target, path: str, length: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", target.port), timeout=120)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {ALICE}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode())
    return connection


def _again(send: Callable[[], None], times: int) -> Callable[[], None]:
    """Return what does it without end, so many times at once."""

    def repeat() -> None:
        while True:
            # The service may close a connection on which something is still to come.
            with suppress(OSError):
                send()
            time.sleep(_PAUSE_SECONDS)

    def repeat_all() -> None:
        threads = [threading.Thread(target=repeat) for _ in range(times)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return repeat_all


def whole(body: Callable[[Target], bytes], times: int = 1, *, leave: float | None = None) -> Flood:
    """Return a flood of whole bodies; with ``leave`` their senders go away after so many seconds."""

    def flood(target: Target) -> Callable[[], None]:
        made = body(target)

        def send() -> None:
            with _connect(target, _EMBEDDINGS, len(made)) as connection:
                began = time.monotonic()
                connection.settimeout(leave or 120)
                connection.sendall(made)
                if leave is None:
                    target.answered(connection)
                else:
                    time.sleep(max(0.0, began + leave - time.monotonic()))

        return _again(send, times)

    return flood


def inputs(*texts: Any, **options: Any) -> Callable[[Target], bytes]:
    """Return what makes a body with inputs."""
    return lambda target: json.dumps(
        {"model": target.model, "input": texts, **options}, ensure_ascii=False
    ).encode()


def values(item: bytes) -> Callable[[Target], bytes]:
    """Return what makes a body that is full of an item."""
    many = _BODY_BYTES // (len(item) + 1) - 1
    return lambda _: b'{"input":[%s%s]}' % ((item + b",") * many, item)


def token_ids(_: Target) -> bytes:
    """Make a body of as many token ids as are read."""
    row = b"[%s]" % b",".join([b"100000"] * 512)
    return b'{"input":[%s]}' % b",".join([row] * 8191)


def halves(path: str) -> Flood:
    """Return a flood of 30 bodies without their last byte, which are held."""

    def flood(target: Target) -> Callable[[], None]:
        def send() -> None:
            piece, left = b" " * MIB, _BODY_BYTES - 1
            with _connect(target, path.format(model=target.model), _BODY_BYTES) as connection:
                while left > 0:
                    left -= connection.send(piece[:left])
                target.answered(connection)

        return _again(send, 30)

    return flood


def raw(head: str, piece: bytes, times: int = 30) -> Flood:
    """Return a flood of connections on which ``piece`` comes again and again behind ``head``."""

    def flood(target: Target) -> Callable[[], None]:
        many = piece * (MIB // len(piece))

        def send() -> None:
            with socket.create_connection(("127.0.0.1", target.port), timeout=20) as connection:
                connection.sendall(head.encode())
                for _ in range(40):
                    connection.sendall(many)
                target.answered(connection)

        return _again(send, times)

    return flood


_KEY_LINE: Final = f"Authorization: Bearer {ALICE}\r\n"
_CHUNKED: Final = f"POST {_EMBEDDINGS} HTTP/1.1\r\nHost: a\r\n{_KEY_LINE}Transfer-Encoding: chunked\r\n\r\n"


# Without a key.
_REFUSED: Final = f"POST {_EMBEDDINGS} HTTP/1.1\r\nHost: a\r\nContent-Length: {1 << 40}\r\n\r\n"


def places(target: Target) -> Callable[[], None]:
    """Hold 1,200 requests whose bodies do not come."""

    def hold() -> None:
        connections = [_connect(target, _EMBEDDINGS, 4) for _ in range(1200)]
        time.sleep(20)
        for connection in connections:
            connection.close()

    return _again(hold, 1)


def unread(target: Target) -> Callable[[], None]:
    """Ask for 60 answers of 20 MB each, and read none of them."""
    ids = b"[%s]" % b",".join([b"1000"] * 512)
    body = b'{"input":[%s]}' % b",".join([ids] * 8000)

    def hold() -> None:
        connections = []
        for _ in range(60):
            connections.append(_connect(target, "/tokenize", len(body)))
            connections[-1].sendall(body)
        time.sleep(20)
        for connection in connections:
            connection.close()

    return _again(hold, 1)


def _varint(number: int) -> bytes:
    return bytes([number & 127 | 128]) + _varint(number >> 7) if number > 127 else bytes([number])


def raw_contents(target: Target) -> bytes:
    """Make a message of gRPC: a model's name, and a tensor without its description."""
    return _named(target) + b"\x3a" + _varint(_MESSAGE_BYTES) + bytes(_MESSAGE_BYTES)


def empty_tensors(target: Target) -> bytes:
    """Make a message that is full of tensors of which nothing is described."""
    return _named(target) + b"\x2a\x00" * (_MESSAGE_BYTES // 2)


def text_rows(target: Target) -> bytes:
    """Make a message of long texts, which wait for a thread as soon as it is parsed."""
    text = b"word " * (MIB * 4 // 5 - 20)
    message = pb.ModelInferRequest(model_name=target.model)
    message.inputs.add(name="text", shape=[7, 1], datatype="BYTES")
    message.parameters["truncate"].string_param = "END"
    message.raw_input_contents.append((len(text).to_bytes(4, "little") + text) * 7)
    return bytes(message.SerializeToString())


def _named(target: Target) -> bytes:
    return b"\x0a" + _varint(len(target.model)) + target.model.encode()


def messages(
    key: str, times: int, make: Callable[[Target], bytes] = raw_contents, *, stream: bool = False
) -> Flood:
    """Return a flood of messages of gRPC, so many at once, in a stream each or in calls."""

    async def call(target: Target, raw: bytes) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        metadata = (("authorization", f"Bearer {key}"),)
        while True:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{target.grpc_port}", options=options) as channel:
                try:
                    if stream:
                        infer = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
                        async for _ in infer(iter([raw] * 4), metadata=metadata, timeout=120):
                            target.answers[200] += 1
                    else:
                        once = channel.unary_unary(MODEL_INFER)
                        await once(raw, metadata=metadata, timeout=120)
                        target.answers[200] += 1
                except grpc.aio.AioRpcError as error:
                    target.answers[error.code().value[0]] += 1
            await asyncio.sleep(_PAUSE_SECONDS)

    async def send_all(target: Target, raw: bytes) -> None:
        await asyncio.gather(*(call(target, raw) for _ in range(times)))

    def flood(target: Target) -> Callable[[], None]:
        raw = make(target)
        return lambda: asyncio.run(send_all(target, raw))

    return flood


def kserve_body(text: str) -> bytes:
    """Make a call of KServe in JSON."""
    tensor = {"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
    return json.dumps({"inputs": [tensor]}).encode()


def kserve_message(model: str, text: str) -> bytes:
    """Make a call of KServe as a message of gRPC."""
    message = pb.ModelInferRequest(model_name=model)
    tensor = message.inputs.add(name="text", shape=[1, 1], datatype="BYTES")
    tensor.contents.bytes_contents.append(text.encode())
    return bytes(message.SerializeToString())


KSERVE: Final = "/v2/models/{model}/infer"
MODEL_INFER: Final = "/inference.GRPCInferenceService/ModelInfer"


def many(path: str, body: Callable[[Target], bytes], times: int) -> Flood:
    """Return a flood of one short request, so many at once, each on a connection that is kept."""
    return in_turn(lambda target: [(path.format(model=target.model), body(target))], times)


def in_turn(requests: Callable[[Target], Sequence[tuple[str, bytes]]], times: int) -> Flood:
    """Return a flood of short requests behind each other, on so many connections, which are kept.

    Each connection begins at another one of them.
    """

    def flood(target: Target) -> Callable[[], None]:
        made = [_request(path, body) for path, body in requests(target)]

        async def ask(first: int) -> None:
            while True:
                with suppress(OSError, asyncio.IncompleteReadError):
                    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
                    for request in cycle(made[first:] + made[:first]):
                        writer.write(request)
                        answer = await reader.readuntil(b"\r\n\r\n")
                        length = re.search(rb"content-length: (\d+)", answer)
                        assert length is not None, answer
                        await reader.readexactly(int(length[1]))
                        target.answers[int(answer[9:12])] += 1
                await asyncio.sleep(_PAUSE_SECONDS)

        async def ask_all() -> None:
            await asyncio.gather(*(ask(number * len(made) // times) for number in range(times)))

        return lambda: asyncio.run(ask_all())

    return flood


def _request(path: str, body: bytes) -> bytes:
    """Make a request of the key that floods; without a body it only asks."""
    head = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: a\r\n{_KEY_LINE}"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


MEMORY: Final = f"flood-{os.getpid()}-"
"""What the names of files with shared memory begin with; the name of a key's owner follows."""
_SHARED: Final = "/v2/systemsharedmemory"


@contextmanager
def shared_memory() -> Iterator[None]:
    """Keep a text in a file for each of both keys."""
    files = [Path("/dev/shm", MEMORY + owner) for owner in (_ALICE, BOB)]
    try:
        for file in files:
            file.write_bytes(len(SHORT).to_bytes(4, "little") + SHORT.encode())
        yield
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def region_calls(model: str, owner: str, name: str) -> list[tuple[str, bytes]]:
    """Make requests that register a region, call with it as the input, and unregister it."""
    size = 4 + len(SHORT)
    place = {"key": MEMORY + owner, "offset": 0, "byte_size": size}
    parameters = {"shared_memory_region": name, "shared_memory_byte_size": size}
    tensor = {"name": "text", "shape": [1, 1], "datatype": "BYTES", "parameters": parameters}
    return [
        (f"{_SHARED}/region/{name}/register", json.dumps(place).encode()),
        (KSERVE.format(model=model), json.dumps({"inputs": [tensor]}).encode()),
        (f"{_SHARED}/region/{name}/unregister", b"{}"),
    ]


def regions(target: Target) -> list[tuple[str, bytes]]:
    """Take more regions than a key may have, name another key's, and let go of all."""
    requests: list[tuple[str, bytes]] = []
    for number in range(1000):
        register, call, _ = region_calls(target.model, _ALICE, f"flood-{number}")
        requests.append(register)
        if number % 10 == 0:
            requests += [call, *region_calls(target.model, BOB, BOB)[1:], (f"{_SHARED}/status", b"")]
    return [*requests, (f"{_SHARED}/unregister", b"{}")]


def many_calls(times: int) -> Flood:
    """Return a flood of short calls of gRPC, so many at once, over 8 connections."""

    async def ask_all(target: Target, raw: bytes) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [
            grpc.aio.insecure_channel(f"127.0.0.1:{target.grpc_port}", options=options) for _ in range(8)
        ]

        async def ask(number: int) -> None:
            call = channels[number % len(channels)].unary_unary(MODEL_INFER)
            while True:
                try:
                    await call(raw, metadata=(("authorization", f"Bearer {ALICE}"),), timeout=120)
                    target.answers[200] += 1
                except grpc.aio.AioRpcError as error:
                    target.answers[error.code().value[0]] += 1
                    await asyncio.sleep(_PAUSE_SECONDS)

        await asyncio.gather(*map(ask, range(times)))

    def flood(target: Target) -> Callable[[], None]:
        raw = kserve_message(target.model, SHORT)
        return lambda: asyncio.run(ask_all(target, raw))

    return flood


def _picture(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}]


def addresses(pattern: str, number: int, times: int) -> Flood:
    """Return a flood of requests for pictures by so many addresses, never the same."""

    def flood(target: Target) -> Callable[[], None]:
        numbers = count()

        def send() -> None:
            urls = [pattern.format(port=target.pictures, number=next(numbers)) for _ in range(number)]
            target.ask(_EMBEDDINGS, inputs(*map(_picture, urls), partial=True)(target))

        return _again(send, times)

    return flood


def fresh_pictures(target: Target) -> Callable[[], None]:
    """Send pictures that no cache has seen, 16 in each of 4 requests."""

    def send() -> None:
        encoded = (base64.b64encode(fresh(tile())).decode() for _ in range(16))
        pictures = (_picture(f"data:image/jpeg;base64,{data}") for data in encoded)
        target.ask(_EMBEDDINGS, inputs(*pictures)(target))

    return _again(send, 4)


def dear_pictures(target: Target) -> Callable[[], None]:
    """Send pictures of a few kilobytes that take a second to decode, 12 in each of 4 requests."""
    file = BytesIO()
    Image.new("RGB", (9000, 9000), (1, 2, 3)).save(file, "PNG")
    picture = file.getvalue()

    def send() -> None:
        encoded = (base64.b64encode(fresh(picture)).decode() for _ in range(12))
        target.ask(
            _EMBEDDINGS, inputs(*(_picture(f"data:image/png;base64,{data}") for data in encoded))(target)
        )

    return _again(send, 4)


def nothing(_: Target) -> Callable[[], None]:
    """Send nothing."""
    return partial(time.sleep, 3600)


SLOW_NAMES: Final = "8 slow names"
REGIONS: Final = "regions of shared memory"
FLOODS: Final[dict[str, Flood]] = {
    "nothing": nothing,
    "60 MB of []": whole(values(b"[]")),
    "60 MB of {}": whole(values(b"{}")),
    "60 MB of integers": whole(values(b"1")),
    '60 MB of ""': whole(values(b'""')),
    "4.2 million token ids": whole(token_ids),
    "one text of 60 MB": whole(inputs("word " * (_BODY_BYTES // 5))),
    "4 x 38 million characters": whole(inputs(*[_ACCENTS] * 10), 4),
    "4 x 38 million, and leave": whole(inputs(*[_ACCENTS] * 10), 4, leave=1.0),
    "4 x 100 long texts": whole(inputs(*["e\u0301" * 120_000] * 100), 4),
    "24 messages, wrong key": messages("sk-wrong-0123456789", 24),
    "24 messages": messages(ALICE, 24),
    "4 messages, empty tensors": messages(ALICE, 4, empty_tensors),
    "100 messages, long texts": messages(ALICE, 100, text_rows),
    "8 streams of messages": messages(ALICE, 8, stream=True),
    SLOW_NAMES: addresses("http://slow{number}.example/x", 8, 4),
    "3 x 256 slow pictures": addresses("http://127.0.0.1:{port}/slow/{number}", 256, 3),
    "40 x 16 large pictures": addresses("http://127.0.0.1:{port}/large/{number}", 16, 40),
    "pictures with bytes behind": addresses("http://127.0.0.1:{port}/behind/{number}", 16, 4),
    "pictures in chunks of a byte": addresses("http://127.0.0.1:{port}/chunks/{number}", 16, 4),
    "pictures behind interim answers": addresses("http://127.0.0.1:{port}/interim/{number}", 16, 4),
    "chunks of a byte": raw(_CHUNKED, b"1\r\n \r\n"),
    "chunks with extensions": raw(_CHUNKED, b"1;" + b"a" * 60_000 + b"\r\n \r\n"),
    "heads of many fields": raw("GET /live HTTP/1.1\r\nHost: a\r\n", b"a:b\r\n"),
    "requests behind each other": raw("", b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"),
    "1,200 bodies that do not come": places,
    "60 unread answers": unread,
    "600 refused bodies without end": raw(_REFUSED, b" " * 65_536, 600),
    "30 half bodies": halves(_EMBEDDINGS),
    "30 half bodies, KServe": halves(KSERVE),
    "600 requests": many(_EMBEDDINGS, inputs(SHORT), 600),
    "600 calls, KServe": many(KSERVE, lambda _: kserve_body(SHORT), 600),
    "600 calls, gRPC": many_calls(600),
    REGIONS: in_turn(regions, 16),
    "fresh pictures": fresh_pictures,
    "pictures that are dear to decode": dear_pictures,
}
"""By what is sent, at once and again and again."""


def tile() -> bytes:
    """Make a photo of 512 x 512 pixels."""
    coarse = np.random.default_rng(1).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(coarse).resize((512, 512), Image.Resampling.BICUBIC).save(file, "JPEG")
    return file.getvalue()


def fresh(picture: bytes) -> bytes:
    """Return a file of the same picture that no cache has seen."""
    return picture + random.randbytes(8)


class PictureHost:
    """Answers ``/slow`` with a byte now and then, ``/behind`` with bytes behind it, others at once.

    ``/large`` has 12 MB, ``/interim`` no end of interim answers, and ``/chunks`` none of chunks of a byte.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]

    def serve(self) -> None:
        """The main of its process."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._tile = tile()
        async with await asyncio.start_server(self._answer, sock=self._listener) as server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
                data = fresh(self._tile)
                head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data)
                if path.startswith(b"/slow"):
                    writer.write(head)
                    for at in range(20):
                        writer.write(data[at : at + 1])
                        await writer.drain()
                        await asyncio.sleep(0.5)
                    break
                if path.startswith((b"/interim", b"/chunks")):
                    interim = path.startswith(b"/interim")
                    if not interim:
                        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                    piece = b"HTTP/1.1 103 Early Hints\r\n\r\n" if interim else b"1\r\nx\r\n"
                    while not writer.is_closing():
                        writer.write(piece * 10_000)
                        await writer.drain()
                    break
                if path.startswith(b"/large"):
                    length, piece = len(data) + 12 * MIB, bytes(MIB)
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length + data)
                    for _ in range(12):
                        writer.write(piece)
                        await writer.drain()
                    continue
                behind = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil" * path.startswith(b"/behind")
                writer.write(head + data + behind)
                await writer.drain()
        writer.close()
