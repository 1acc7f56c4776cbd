"""``python -m benchmarks.bodies``: what other clients feel while one key sends large and hostile bodies.

Starts one frontend without workers, and floods it from a process of its own: bodies of millions of values,
bodies without their last byte, messages of gRPC with a wrong key and with a good one. Another process asks
for the tokens of a short text with another key all the while, and for ``/live``. ``--commit`` has the package
of another commit do the same.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import httpx2

from benchmarks.ports import free_ports
from tessera_tools.random_checkpoint.checkpoint import main as make_checkpoint
from tessera_tools.table import table

_MIB: Final = 1 << 20
_BODY_BYTES: Final = 60 * _MIB
_ALICE: Final = "sk-alice-0123456789"
_BOB: Final = "sk-bob-0123456789"
_ROOT: Final = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Running:
    """Names a frontend's process and its ports."""

    pid: int
    port: int
    grpc_port: int

    def memory(self, name: str) -> int:
        """Return bytes of memory: ``VmRSS`` now, ``VmHWM`` at most since the last ``forget_peak``."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith(f"{name}:"))
        return int(line.split()[1]) << 10

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


Flood = Callable[[Running], None]


def _connect(running: Running, path: str, length: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {_ALICE}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode())
    return connection


def values(item: bytes) -> Flood:
    """Return a flood of one body that is full of an item."""

    def send(running: Running) -> None:
        body = b'{"input":[%s]}' % b",".join([item] * (_BODY_BYTES // (len(item) + 1)))
        with _connect(running, "/v1/embeddings", len(body)) as connection:
            connection.sendall(body)
            connection.recv(1)

    return send


def halves(path: str) -> Flood:
    """Return a flood of 30 bodies without their last byte."""

    def send_one(connection: socket.socket) -> None:
        piece, left = b" " * _MIB, _BODY_BYTES - 1
        try:
            while left > 0:
                left -= connection.send(piece[:left])
        except OSError:
            pass

    def send(running: Running) -> None:
        with ExitStack() as stack:
            connections = [stack.enter_context(_connect(running, path, _BODY_BYTES)) for _ in range(30)]
            threads = [threading.Thread(target=send_one, args=(one,)) for one in connections]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            time.sleep(1)

    return send


def messages(key: str) -> Flood:
    """Return a flood of 24 messages of gRPC at once."""
    # A model's name, and a tensor without its description.
    size = bytes([_BODY_BYTES & 127 | 128, _BODY_BYTES >> 7 & 127 | 128, _BODY_BYTES >> 14 & 127 | 128])
    head = b"\x0a\x06router\x3a" + size + bytes([_BODY_BYTES >> 21])

    async def call(running: Running, raw: bytes) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.grpc_port}", options=options) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            await infer(raw, metadata=(("authorization", f"Bearer {key}"),), timeout=120).code()

    async def send_all(running: Running) -> None:
        raw = head + bytes(_BODY_BYTES)
        await asyncio.gather(*(call(running, raw) for _ in range(24)))

    return lambda running: asyncio.run(send_all(running))


FLOODS: Final[dict[str, Flood]] = {
    "60 MB of []": values(b"[]"),
    "60 MB of integers": values(b"1"),
    '60 MB of ""': values(b'""'),
    "30 half bodies": halves("/v1/embeddings"),
    "30 half bodies, KServe": halves("/v2/models/router/infer"),
    "24 messages, wrong key": messages("sk-wrong-0123456789"),
    "24 messages": messages(_ALICE),
}


def probe(running: Running, answers: Connection) -> None:
    """Ask until the connection has something to read, then give the seconds of all answers."""
    tokens: list[float] = []
    live: list[float] = []
    headers = {"authorization": f"Bearer {_BOB}"}
    with httpx2.Client(base_url=f"http://127.0.0.1:{running.port}", headers=headers, timeout=120) as client:
        while not answers.poll(0.01):
            for seconds, ask in (
                (tokens, lambda: client.post("/tokenize", json={"prompt": "a short text"})),
                (live, lambda: client.get("/live")),
            ):
                began = time.monotonic()
                ask().raise_for_status()
                seconds.append(time.monotonic() - began)
    answers.send((tokens, live))


def measure(running: Running, flood: Flood) -> tuple[str, ...]:
    """Run one flood; return the other key's median and p99, the longest stall, and memory."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    rest = running.memory("VmRSS")
    running.forget_peak()
    asking = context.Process(target=probe, args=(running, theirs))
    asking.start()
    time.sleep(0.5)
    sending = context.Process(target=flood, args=(running,))
    sending.start()
    sending.join()
    peak = running.memory("VmHWM")
    ours.send(None)
    tokens, live = ours.recv()
    asking.join()
    time.sleep(12)
    after = running.memory("VmRSS")
    percent = statistics.quantiles(tokens, n=100, method="inclusive")
    # The loop may have stood while either was asked for.
    seconds = (percent[49], percent[98], max(*tokens, *live))
    return (*(f"{1e3 * value:.0f}" for value in seconds), *(f"{n // _MIB}" for n in (rest, peak, after)))


@contextmanager
def package_of(commit: str | None, folder: Path) -> Iterator[Path]:
    """Give the folder of the package: that of this tree, or that of a commit."""
    if commit is None:
        yield _ROOT / "components" / "src"
        return
    archive = ["git", "-C", str(_ROOT), "archive", commit, "components"]
    with subprocess.Popen(archive, stdout=subprocess.PIPE) as packed:
        subprocess.run(["tar", "-x", "-C", str(folder)], stdin=packed.stdout, check=True)
    yield folder / "components" / "src"


@contextmanager
def frontend(model: Path, source: Path, folder: Path) -> Iterator[Running]:
    """Run a frontend with two keys and a port for gRPC."""
    keys = folder / "keys"
    keys.write_text(f"{_ALICE} alice\n{_BOB} bob\n")
    port, grpc_port = free_ports(2)
    words = [sys.executable, "-m", "tessera.frontend", "--model-path", str(model), "--port", str(port)]
    words += ["--grpc-port", str(grpc_port), "--api-keys-file", str(keys), "--discovery-backend", "file"]
    places = {"PYTHONPATH": str(source), "DYN_FILE_KV": str(folder / "discovery")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, env=os.environ | places, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx2.get(f"http://127.0.0.1:{port}/live").raise_for_status()
                break
            except httpx2.HTTPError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit((folder / "log").read_text()) from error
                time.sleep(0.1)
        yield Running(process.pid, port, grpc_port)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bodies", description=__doc__)
    parser.add_argument("--commit", help="measure the package of this commit")
    parser.add_argument("--only", nargs="+", choices=FLOODS, default=list(FLOODS), help="these floods")
    options = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_checkpoint(["--out", str(folder / "model"), "--size", "tiny"])
        source = stack.enter_context(package_of(options.commit, folder))
        running = stack.enter_context(frontend(folder / "model", source, folder))
        rows = [(name, *measure(running, FLOODS[name])) for name in options.only]
    head = ("flood", "p50, ms", "p99, ms", "longest stall, ms", "rest, MiB", "peak, MiB", "after 12 s, MiB")
    print(table(head, rows))


if __name__ == "__main__":
    main()
