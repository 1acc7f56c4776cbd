"""The bytes of all bodies of a frontend as a process: refused before they are read, and given back."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import selectors
import socket
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import ClassVar

import grpc.aio
import numpy as np
import pytest
from PIL import Image

from tessera_kserve import messages_pb2 as pb
from tessera_kserve.receiving import WINDOW_BYTES
from tessera_kserve.silence import MOST_GROWTH_BYTES
from tests.e2e.service import free_ports
from tests.frontend.alone import Alone, frontend_process
from tests.waiting import until, wait_until

pytestmark = [pytest.mark.service, pytest.mark.kserve]

MIB = 1 << 20
BUDGET = 256 * MIB
MORE = 512 * MIB
BODY = 60 * MIB
MESSAGE = 15 * MIB
PICTURE = 12 * MIB
ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"
REGIONS = "tessera-bytes-"
KSERVE = "/v2/models/router/infer"


@dataclass(frozen=True, slots=True)
class Running:
    alone: Alone
    grpc_port: int

    @property
    def held_bytes(self) -> float:
        text = self.alone.http.get("/metrics", headers=headers(BOB)).text
        (found,) = re.findall(r"^tessera_body_bytes (\S+)$", text, re.MULTILINE)
        return float(found)

    def refusals(self) -> float:
        text = self.alone.http.get("/metrics", headers=headers(BOB)).text
        return sum(map(float, re.findall(r'tessera_refused_total\{why="bodies"\} (\S+)', text)))

    def announce(self, path: str, key: str, *, length: int | None) -> socket.socket:
        """Send the head of a request; without a length its body is chunked."""
        port = self.alone.http.base_url.port
        assert port is not None
        connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n{framing}\r\n\r\n".encode())
        return connection


def started(checkpoint: Path, folder: Path, *flags: str, budget: int = BUDGET) -> Iterator[Running]:
    (folder / "keys").write_text(f"{ALICE} alice\n{BOB} bob\n")
    (port,) = free_ports(1)
    flags += ("--grpc-port", str(port), "--api-keys-file", str(folder / "keys"))
    flags += ("--max-bodies-mb", str(budget // MIB))
    with frontend_process(checkpoint, folder, *flags) as alone:
        yield Running(alone, port)


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from started(checkpoint, tmp_path_factory.mktemp("bytes"))


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def fill(connections: list[socket.socket]) -> None:
    """Send all but the last byte on each connection, as far as somebody reads it."""
    left = dict.fromkeys(connections, BODY - 1)
    chunk = b" " * MIB
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_WRITE)
        while selector.get_map():
            ready = selector.select(timeout=30)
            assert ready
            for key, _ in ready:
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                try:
                    left[connection] -= connection.send(chunk[: left[connection]])
                except ConnectionError:
                    left[connection] = 0
                if not left[connection]:
                    selector.unregister(connection)


def statuses(connections: list[socket.socket]) -> Counter[bytes]:
    """What was answered by now, and nothing for those whose bodies are waited for."""
    found: Counter[bytes] = Counter()
    for connection in connections:
        connection.setblocking(False)
        try:
            answer = connection.recv(4096)
        except BlockingIOError:
            answer = b""
        found[answer[9:12]] += 1
        assert not answer or b"\r\nretry-after: " in answer
    return found


@pytest.mark.parametrize(("path", "refused"), [(KSERVE, b"503"), ("/v1/embeddings", b"429")])
def test_half_bodies_take_no_more_than_the_budget(running: Running, path: str, refused: bytes) -> None:
    """One key sends 1.8 GB of them; another is answered meanwhile, a body of many megabytes included."""
    rest = running.alone.forget_peak()
    with ExitStack() as stack:
        connections = [stack.enter_context(running.announce(path, ALICE, length=BODY)) for _ in range(30)]
        fill(connections)
        found = statuses(connections)
        assert found[b""] in (1, 2, 3) and found[refused] == 30 - found[b""]
        assert running.held_bytes == found[b""] * BODY
        body = {"model": "none", "input": "a" * 30 * MIB}
        answer = running.alone.http.post("/v1/embeddings", json=body, headers=headers(BOB))
        assert answer.status_code == 400
    assert running.alone.peak_bytes - rest < BUDGET + MORE
    assert running.refusals() >= 27
    wait_until(lambda: running.held_bytes == 0)


def test_a_chunked_body_counts_as_it_comes(running: Running) -> None:
    chunk = b"%x\r\n%s\r\n" % (8 * MIB, b" " * 8 * MIB)
    with ExitStack() as stack:
        connections = []
        for _ in range(4):
            connection = stack.enter_context(running.announce("/v1/embeddings", ALICE, length=None))
            connections.append(connection)
            before = running.held_bytes
            connection.sendall(chunk * 2)
            wait_until(lambda before=before: running.held_bytes >= before + 16 * MIB - MIB)  # type: ignore[misc]
        assert statuses(connections) == {b"": 4}
    wait_until(lambda: running.held_bytes == 0)


def test_a_body_is_refused_when_it_is_announced(running: Running) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(running.announce(KSERVE, ALICE, length=BODY))
        wait_until(lambda: running.held_bytes >= 2 * BODY)
        last = stack.enter_context(running.announce(KSERVE, ALICE, length=BODY))
        assert b"this API key's share of the service is used" in last.recv(4096)
        unknown = stack.enter_context(running.announce("/v2/models/none/infer", BOB, length=BODY))
        assert unknown.recv(4096)[9:12] == b"404"
    wait_until(lambda: running.held_bytes == 0)
    answer = running.alone.http.post("/v1/embeddings", content=b" " * 65 * MIB, headers=headers(ALICE))
    assert answer.status_code == 413


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "RepositoryIndex"])
async def test_messages_of_grpc_take_no_more_than_the_budget(running: Running, method: str) -> None:
    raw = pb.ModelInferRequest(model_name="router", raw_input_contents=[bytes(MESSAGE)]).SerializeToString()
    rest = running.alone.forget_peak()

    async def ask() -> grpc.StatusCode:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.grpc_port}", options=options) as channel:
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(
                raw, metadata=(("authorization", f"Bearer {ALICE}"),)
            )
            return await asyncio.wait_for(call.code(), 120)

    codes = await asyncio.gather(*(ask() for _ in range(60)))
    assert set(codes) <= {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.OK,
    }
    assert running.alone.peak_bytes - rest < BUDGET + MORE
    assert running.held_bytes == 0


async def test_a_message_that_waits_for_its_turn_takes_its_window_alone(running: Running) -> None:
    """Silent calls have all that a key may have; 24 messages of 8 MiB on one connection wait behind them."""
    infer = "/inference.GRPCInferenceService/ModelInfer"
    metadata = (("authorization", f"Bearer {ALICE}"),)
    raw = pb.ModelInferRequest(model_name="router", raw_input_contents=[bytes(8 * MIB)]).SerializeToString()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
        silent = [channel.stream_unary(infer)(metadata=metadata) for _ in range(16)]
        await asyncio.to_thread(wait_until, lambda: running.held_bytes >= 12 * 16 * MIB + 16 * WINDOW_BYTES)
        held = running.held_bytes
        rest = running.alone.forget_peak()
        calls = [channel.unary_unary(infer)(raw, metadata=metadata) for _ in range(24)]
        await asyncio.to_thread(wait_until, lambda: running.held_bytes >= held + 24 * WINDOW_BYTES)
        # For what would come unasked: of gRPC's own windows all 192 MiB did within a second.
        await asyncio.sleep(2)
        assert not any(call.done() for call in (*silent, *calls))
        assert running.alone.peak_bytes - rest < 24 * WINDOW_BYTES + 48 * MIB
    await asyncio.to_thread(wait_until, lambda: running.held_bytes == 0)


@asynccontextmanager
async def relay(port: int, most: int) -> AsyncIterator[int]:
    """Yield a port whose connections pass so many bytes on to another one, and the answers back."""

    async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter, left: int) -> None:
        with suppress(ConnectionError):
            while chunk := await source.read(1 << 16):
                target.write(chunk[:left])
                left = max(0, left - len(chunk))
                await target.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        beyond, back = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, back))
        await asyncio.gather(carry(reader, back, most), carry(beyond, writer, sys.maxsize))

    writers: list[asyncio.StreamWriter] = []
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        for writer in writers:
            writer.transport.abort()
        for writer in writers:
            with suppress(ConnectionError):
                await writer.wait_closed()


async def test_streams_that_never_end_their_message_are_few(running: Running) -> None:
    """Each could take as much as a message has, of which nothing is known before it is whole."""
    rest = running.alone.forget_peak()
    options = [("grpc.use_local_subchannel_pool", 1)]
    infer = "/inference.GRPCInferenceService/ModelStreamInfer"

    async def open_stream(
        stack: AsyncExitStack, port: int, key: str
    ) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
        await stack.enter_async_context(channel)
        return channel.stream_stream(infer)(metadata=(("authorization", f"Bearer {key}"),))

    async def answered(stream: grpc.aio.StreamStreamCall[bytes, bytes], number: int) -> None:
        await stream.write(pb.ModelInferRequest(model_name="none", id=str(number)).SerializeToString())
        answer = pb.ModelStreamInferResponse.FromString(await asyncio.wait_for(stream.read(), 60))
        assert answer.infer_response.id == str(number)

    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(relay(running.grpc_port, MESSAGE - MIB))
        streams = [await open_stream(stack, port, ALICE) for _ in range(40)]
        # That of a turn which it leaves.
        await asyncio.sleep(1.0)
        sending = [asyncio.ensure_future(stream.write(bytes(MESSAGE))) for stream in streams]
        other = await open_stream(stack, running.grpc_port, BOB)
        for number in range(30):
            await answered(other, number)
            await asyncio.sleep(0.1)
        # Of 560 MB. It is looked at twenty times a second, when a busy machine lets it.
        assert running.alone.peak_bytes - rest < MOST_GROWTH_BYTES + 256 * MIB
        await answered(await open_stream(stack, running.grpc_port, ALICE), 0)
        # Their messages come as fast as the machine lets them.
        await until(lambda: any(stream.done() for stream in streams))
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
    await asyncio.to_thread(wait_until, lambda: running.held_bytes == 0)


@pytest.fixture(scope="module")
def crowded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A frontend whose budget is less than the largest message of gRPC."""
    yield from started(checkpoint, tmp_path_factory.mktemp("crowded"), budget=8 * MIB)


async def metadata_of_server(running: Running, key: str, times: int, message: bytes = b"") -> list[str]:
    """Return how so many calls end that come at once, by the words of their errors."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.grpc_port}", options=options) as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")

        async def answered() -> str:
            try:
                await ask(message, metadata=(("authorization", f"Bearer {key}"),))
            except grpc.aio.AioRpcError as error:
                return str(error.details())
            return ""

        return await asyncio.gather(*(answered() for _ in range(times)))


async def test_small_calls_of_grpc_that_come_together_are_all_answered(
    running: Running, crowded: Running
) -> None:
    """What they hold while they wait for their turns left no room for the one whose turn it was."""
    refused = crowded.refusals()
    assert await metadata_of_server(crowded, ALICE, 1) == [""]
    # Fewer than may wait in a line.
    assert Counter(await metadata_of_server(crowded, ALICE, 600)) == {"": 600}
    # gRPC keeps 1,000 that nobody has taken, and cancels some of the others.
    assert Counter(await metadata_of_server(running, ALICE, 1500)) == {"": 1500}
    await asyncio.to_thread(wait_until, lambda: running.held_bytes == crowded.held_bytes == 0)
    # To wait is no refusal, however often there was no room meanwhile.
    assert crowded.refusals() == refused


async def test_a_message_of_grpc_that_is_larger_than_half_of_the_budget(crowded: Running) -> None:
    """It is received where it is alone, as a body of HTTP is."""
    message = bytes([0x1A, 0x80, 0x80, 0x80, 5]) + bytes(10 * MIB)
    (found,) = await metadata_of_server(crowded, ALICE, 1, message)
    assert "larger than the 65536 bytes" in found
    await asyncio.to_thread(wait_until, lambda: crowded.held_bytes == 0)


@pytest.fixture(scope="module")
def waiting(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A frontend whose requests wait for a worker, which does not come."""
    flags = ("--worker-wait-seconds", "600", "--request-timeout-seconds", "600")
    flags += ("--kserve-shared-memory", REGIONS, "--allow-private-media", "--media-timeout-seconds", "600")
    yield from started(checkpoint, tmp_path_factory.mktemp("waiting"), *flags)


def test_a_request_holds_its_bytes_until_it_is_answered(waiting: Running) -> None:
    """What was a body is a text or an image then, which lives as long."""
    picture = BytesIO()
    Image.new("RGB", (64, 64)).save(picture, "PNG")
    # A decoder looks at no more than it needs.
    url = b"data:image/png;base64," + base64.b64encode(picture.getvalue() + bytes(8 * MIB))
    body = b'{"input": [{"type": "image_url", "image_url": {"url": "%s"}}]}' % url
    with waiting.announce("/v1/embeddings", ALICE, length=len(body)) as connection:
        connection.sendall(body)
        # Large bodies are read one after another, each in two turns.
        for _ in range(3):
            answer = waiting.alone.http.post("/v1/embeddings", content=b"[" * 2 * MIB, headers=headers(ALICE))
            assert answer.status_code == 400
        assert waiting.held_bytes == len(body)
        assert statuses([connection]) == {b"": 1}
    wait_until(lambda: waiting.held_bytes == 0)


class Pictures(BaseHTTPRequestHandler):
    """Has the same picture at every path, and notes when one has been read to its end."""

    protocol_version = "HTTP/1.1"
    data = b""
    read: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.data)))
        self.send_header("Connection", "close")
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(self.data)
            # Until the other side closes: what has been sent may lie in the system's buffers.
            self.rfile.read()
            self.read.append(self.path)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def large_pictures() -> Iterator[str]:
    """Serve a picture of ``PICTURE`` bytes, most of them behind what a decoder looks at; the URL."""
    file = BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    handler = type("Large", (Pictures,), {"data": file.getvalue().ljust(PICTURE, b"\0")})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as host:
        serving = threading.Thread(target=host.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{host.server_port}"
        host.shutdown()
        serving.join()


def test_pictures_that_are_named_wait_for_room_and_are_kept_once(
    waiting: Running, large_pictures: str
) -> None:
    """Of three requests two have all of theirs, and the third those that its key's share has room for."""

    def ask(stack: ExitStack, key: str, pictures: int) -> socket.socket:
        urls = [{"type": "image_url", "image_url": {"url": large_pictures}}] * pictures
        body = json.dumps({"input": [[url] for url in urls]}).encode()
        connection = stack.enter_context(waiting.announce("/v1/embeddings", key, length=len(body)))
        connection.sendall(body)
        return connection

    rest, share = waiting.alone.forget_peak(), BUDGET * 4 // 5
    with ExitStack() as stack:
        connections = [ask(stack, ALICE, 8) for _ in range(3)]
        wait_until(lambda: waiting.held_bytes > share - PICTURE)
        # Another key's has room, and its turn.
        held = waiting.held_bytes
        connections.append(ask(stack, BOB, 1))
        wait_until(lambda: waiting.held_bytes >= held + PICTURE)
        wait_until(lambda: len(Pictures.read) == held // PICTURE + 1)
        assert held <= share and statuses(connections) == {b"": 4}
        # Beside them 18 connections have a read each: 10 MB with all else. Pieces that were joined, and reads
        # that nobody had asked for, took 153 to 176.
        assert waiting.alone.peak_bytes < rest + held + PICTURE + 32 * MIB
    wait_until(lambda: waiting.held_bytes == 0)


def pixels(rows: int) -> dict[str, np.ndarray]:
    """Return the inputs of a call; the model takes tiles of 256 pixels."""
    return {
        "input_ids": np.ones((rows, 2), "<i8"),
        "pixel_values": np.zeros((rows, 1, 3, 256, 256), "<f4"),
    }


def in_messages(inputs: dict[str, np.ndarray]) -> pb.ModelInferRequest:
    call = pb.ModelInferRequest(model_name="router")
    for name, values in inputs.items():
        datatype = "INT64" if values.dtype.kind == "i" else "FP32"
        call.inputs.add(name=name, datatype=datatype, shape=values.shape)
        call.raw_input_contents.append(values.tobytes())
    return call


def in_shared_memory(inputs: dict[str, np.ndarray], offset: int = 0) -> pb.ModelInferRequest:
    call = in_messages(inputs)
    call.ClearField("raw_input_contents")
    for tensor, values in zip(call.inputs, inputs.values(), strict=True):
        tensor.parameters["shared_memory_region"].string_param = "pixels"
        tensor.parameters["shared_memory_offset"].int64_param = offset
        tensor.parameters["shared_memory_byte_size"].int64_param = values.nbytes
        offset += values.nbytes
    return call


@contextmanager
def shared(name: str, inputs: dict[str, np.ndarray]) -> Iterator[pb.SystemSharedMemoryRegisterRequest]:
    """Write a file of shared memory, and yield what registers it."""
    memory = Path("/dev/shm", name)
    memory.write_bytes(b"".join(values.tobytes() for values in inputs.values()))
    try:
        yield pb.SystemSharedMemoryRegisterRequest(
            name="pixels", key=f"/{name}", byte_size=memory.stat().st_size
        )
    finally:
        memory.unlink()


@pytest.mark.parametrize(
    ("make", "rows", "times"),
    [(in_messages, 18, 120), (in_shared_memory, 75, 30)],
    ids=["messages", "regions"],
)
async def test_calls_of_grpc_that_wait_take_no_more_than_the_budget(
    waiting: Running, make: Callable[[dict[str, np.ndarray]], pb.ModelInferRequest], rows: int, times: int
) -> None:
    """1.7 GB of pixels: those that have room wait for a worker, the others for room, and none is refused."""
    inputs, metadata = pixels(rows), (("authorization", f"Bearer {ALICE}"),)
    raw = make(inputs).SerializeToString()
    with shared(f"{REGIONS}{waiting.grpc_port}", inputs) as region:
        rest = waiting.alone.forget_peak()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{waiting.grpc_port}") as channel:
            register = channel.unary_unary("/inference.GRPCInferenceService/SystemSharedMemoryRegister")
            await register(region.SerializeToString(), metadata=metadata)
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            calls = [infer(raw, metadata=metadata) for _ in range(times)]
            # Four fifths of the budget, less what another one, or the largest message, would have.
            least = BUDGET * 4 // 5 - 60 * MIB
            await asyncio.to_thread(wait_until, lambda: waiting.held_bytes >= least)
            await asyncio.sleep(2)
            assert not any(call.done() for call in calls)
            assert waiting.alone.peak_bytes - rest < BUDGET + MORE
            for call in calls:
                call.cancel()
            await asyncio.to_thread(wait_until, lambda: waiting.held_bytes == 0)
            unregister = channel.unary_unary("/inference.GRPCInferenceService/SystemSharedMemoryUnregister")
            await unregister(b"", metadata=metadata)


def test_the_memory_comes_back(running: Running) -> None:
    rest = running.alone.forget_peak()
    with ExitStack() as stack:
        connections = [stack.enter_context(running.announce(KSERVE, ALICE, length=BODY)) for _ in range(3)]
        fill(connections)
    wait_until(lambda: running.alone.forget_peak() < rest + 100 * MIB)
