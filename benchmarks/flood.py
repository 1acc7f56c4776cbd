"""``python -m benchmarks.flood``: what another key feels, and a frontend's memory, while one key floods.

One frontend and a worker whose engine costs nothing, so that what is felt is the service. For each flood of
``floods``: the other key's latencies of a short text, a long one, a picture that a host has, and a text over
KServe by HTTP and by gRPC (in the flood of regions, over HTTP, in one that is registered before and
unregistered afterwards), the longest
time in which the frontend's loop did not answer ``/live``, the share of the time in which that loop had work
and no processor, and memory: of the frontend at rest, at most, and after the flood; of the processes below it
at most. And what a key learns of another by caches (``told``).
``--commit`` has another commit's package do the same.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import grpc

from benchmarks import told, usage
from benchmarks.cost import worktree
from benchmarks.floods import (
    ALICE,
    BOB,
    FLOODS,
    KSERVE,
    MEMORY,
    MIB,
    MODEL_INFER,
    REGIONS,
    SHORT,
    SLOW_NAMES,
    PictureHost,
    Target,
    kserve_body,
    kserve_message,
    region_calls,
    shared_memory,
)
from benchmarks.free_family import installed
from benchmarks.names import own_names
from benchmarks.ports import free_ports
from benchmarks.proc import below
from benchmarks.service import NAME, Deployment, service
from tessera_tools.table import table, write_csv

_BOB: Final = "sk-bob-0123456789"
# 6,000 characters: tokenised on a thread.
_LONG: Final = "word " * 1200
_PAUSE_SECONDS: Final = 0.02
_MOST_SECONDS: Final = 150.0
_LIVE: Final = "/live"
_TOLD: Final = "what another key has sent"
_FORK: Final = multiprocessing.get_context("fork")


@dataclass(slots=True)
class Felt:
    """Holds the seconds of the other key's answers by kind, and how many were none."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failed: int = 0


_KINDS: Final = ("short", "long", "picture", "KServe", "gRPC")


def _asks(target: Target, connection: http.client.HTTPConnection) -> dict[str, Callable[[], None]]:
    """Return what asks with the other key, by kind, and raises an error for what is no answer."""
    numbers = count()
    headers = {"Authorization": f"Bearer {_BOB}", "Content-Type": "application/json"}

    def ask(path: str, body: bytes | None = None) -> None:
        connection.request("GET" if body is None else "POST", path, body, headers)
        with connection.getresponse() as answer:
            answer.read()
        if answer.status != 200:
            raise http.client.HTTPException(answer.status)

    def embed(value: Any) -> None:
        ask("/v1/embeddings", json.dumps({"model": NAME, "input": value}).encode())

    def picture() -> None:
        number = next(numbers)
        url = f"http://{target.host.format(number=number)}:{target.pictures}/{number}"
        embed([{"type": "image_url", "image_url": {"url": url}}])

    def kserve() -> None:
        body = kserve_body(f"{SHORT} {next(numbers)}")
        calls = region_calls(NAME, BOB, BOB) if target.regions else [(KSERVE.format(model=NAME), body)]
        for path, asked in calls:
            ask(path, asked)

    channel = grpc.insecure_channel(f"127.0.0.1:{target.grpc_port}")

    def call() -> None:
        message = kserve_message(NAME, f"{SHORT} {next(numbers)}")
        metadata = (("authorization", f"Bearer {_BOB}"),)
        channel.unary_unary(MODEL_INFER)(message, metadata=metadata, timeout=_MOST_SECONDS)

    return {
        "short": lambda: embed(f"{SHORT} {next(numbers)}"),
        "long": lambda: embed(f"{_LONG} {next(numbers)}"),
        "picture": picture,
        "KServe": kserve,
        "gRPC": call,
        _LIVE: lambda: ask(_LIVE),
    }


def probe(target: Target, answers: Connection) -> None:
    """Ask until the connection has something to read, then give what was felt."""
    felt, over = Felt(), threading.Event()

    def ask(kind: str) -> None:
        seconds = felt.seconds.setdefault(kind, [])
        connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=_MOST_SECONDS)
        once = _asks(target, connection)[kind]
        while not over.is_set():
            began, answered = time.monotonic(), True
            try:
                once()
            except (OSError, http.client.HTTPException, grpc.RpcError):
                felt.failed += 1
                # A refusal that comes at once is no short wait; what keeps the loop is a stall anyway.
                answered = kind == _LIVE
                connection.close()
            if answered:
                seconds.append(time.monotonic() - began)
            over.wait(_PAUSE_SECONDS)
        connection.close()

    threads = [threading.Thread(target=ask, args=(kind,)) for kind in (*_KINDS, _LIVE)]
    for thread in threads:
        thread.start()
    answers.recv()
    over.set()
    for thread in threads:
        thread.join()
    answers.send(felt)


class Process:
    """Reads what a frontend waits, and its memory and that of the processes below it, in bytes."""

    def __init__(self) -> None:
        self._pid = next(pid for pid in below(os.getpid()) if b"-m\0tessera.frontend\0" in _command(pid))
        self.most_below = 0

    def of(self, name: str) -> int:
        """Return ``VmRSS``, which is now, or ``VmHWM``, at most since ``forget``."""
        status = Path(f"/proc/{self._pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith(f"{name}:")).split()[1]) << 10

    def forget(self) -> None:
        """Begin anew to look for the most."""
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")
        self.most_below = 0

    def waited_seconds(self) -> float:
        """Return how long its event loop has waited for a processor that others had."""
        return int(Path(f"/proc/{self._pid}/schedstat").read_text().split()[1]) / 1e9

    def look_below(self) -> None:
        """Add the shares of the processes below up; their pages are mostly shared."""
        total = 0
        for pid in below(self._pid):
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        self.most_below = max(self.most_below, total)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def running(main: Callable[..., None], *arguments: Any, nice: int = 0) -> Iterator[BaseProcess]:
    """Run a function in a process of its own, which is killed at the end."""

    def run() -> None:
        os.nice(nice)
        main(*arguments)

    process = _FORK.Process(target=run, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


_HEAD: Final = (
    "flood",
    *(f"{kind} {share}, ms" for kind in _KINDS for share in ("p50", "p99")),
    "longest stall, ms",
    "loop waits for a processor",
    "failed",
    "flood's answers",
    *(f"{when}, MiB" for when in ("rest", "peak", "after", "below")),
)


def measure(name: str, target: Target, seconds: float, rest: float, nice: int) -> tuple[str, ...]:
    """Run one flood, so ``nice`` to the others, for so many seconds, and return its row."""
    frontend, flood = Process(), FLOODS[name](target)
    frontend.forget()
    target.answers[:] = [0] * len(target.answers)
    before = frontend.of("VmRSS")
    ours, theirs = _FORK.Pipe()
    began, waited = time.monotonic(), frontend.waited_seconds()
    with running(probe, target, theirs):
        time.sleep(0.3)
        with running(flood, nice=nice) as flooding:
            end = time.monotonic() + seconds
            while time.monotonic() < end and flooding.is_alive():
                time.sleep(0.25)
                frontend.look_below()
        ours.send(None)
        if not ours.poll(_MOST_SECONDS):
            raise TimeoutError(f"{name}: the service does not answer")
        felt: Felt = ours.recv()
    busy = (frontend.waited_seconds() - waited) / (time.monotonic() - began)
    peak = frontend.of("VmHWM")
    time.sleep(rest)
    stall = max(felt.seconds.pop(_LIVE))
    shares: list[float] = []
    for kind in _KINDS:
        # Few answers in a long wait are the wait; without any there is none.
        found = felt.seconds[kind] or [math.nan]
        percent = statistics.quantiles(found * 2, n=100, method="inclusive")
        shares += (percent[49], percent[98])
    figures = [f"{1e3 * value:.0f}" for value in (*shares, stall)] + [f"{busy:.0%}"]
    answers = " ".join(f"{number}x{status}" for status, number in enumerate(target.answers) if number)
    sizes = (before, peak, frontend.of("VmRSS"), frontend.most_below)
    return (name, *figures, str(felt.failed), answers, *(str(size // MIB) for size in sizes))


@contextmanager
def _deployment(options: argparse.Namespace, target: Target) -> Iterator[Deployment]:
    stage: dict[str, object] = {"device": "cpu", "dtype": "bfloat16", "graph_cost": 0}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        keys = Path(folder, "keys")
        keys.write_text(f"{ALICE} alice\n{_BOB} {BOB}\n")
        stack.enter_context(shared_memory())
        before: Sequence[str] = ()
        if SLOW_NAMES in options.only:
            if (names := own_names(Path(folder))) is None:
                options.only.remove(SLOW_NAMES)
                print(f"without {SLOW_NAMES!r}, which needs the rights of root", file=sys.stderr)
            else:
                stack.enter_context(running(names.serve))
                before = names.command
        flags: tuple[str, ...] = ("--grpc-port", str(target.grpc_port), "--api-keys-file", str(keys))
        flags += ("--allow-private-media", "--kserve-shared-memory", MEMORY)
        arguments: dict[str, Any] = {}
        if options.commit is not None:
            arguments["tree"] = stack.enter_context(worktree(options.commit))
        yield Deployment(
            model_path=stack.enter_context(installed()),
            engine={
                "vision": {**stage, "max_batch_cost": 28, "max_queue_cost": 4096},
                "text": {**stage, "max_batch_cost": 16384, "max_queue_cost": 4 << 20},
                "preprocess": "processes",
                # The least that a worker chooses; of one alone a key's turn may be a large picture away.
                "preprocess_threads": 2,
                "threads": 1,
            },
            worker_flags=("--multimodal-embedding-cache-capacity-gb", "0"),
            frontend_flags=flags,
            before={"tessera.frontend": tuple(before)},
            **arguments,
        )


def _told(options: argparse.Namespace, host: PictureHost, answers: MutableSequence[int]) -> None:
    """Print what a key learns of another, by the caches as they are and where they are a key's own."""
    rows: list[tuple[str, ...]] = []
    (grpc_port,) = free_ports(1)
    target = Target(port=0, grpc_port=grpc_port, model=NAME, pictures=host.port, answers=answers)
    # Older commits have no such flag.
    for flag in ("", *(["--cache-by-key"] if options.commit is None else [])):
        with ExitStack() as stack:
            deployment = stack.enter_context(_deployment(options, target))
            flags = (*deployment.frontend_flags, "--result-cache-mb", "64", *([flag] if flag else []))
            worker = ("--multimodal-embedding-cache-capacity-gb", "0.1")
            deployment = replace(deployment, frontend_flags=flags, worker_flags=worker)
            (url,) = stack.enter_context(service(deployment, options.out / "logs"))
            rows += (told.row(url, ALICE, _BOB, flag or "caches of all", kind) for kind in told.KINDS)
    print(f"\n{options.commit or 'this tree'}\n" + table(told.HEAD, rows))
    write_csv(options.out / f"told-{options.commit or 'this'}.csv", told.HEAD, rows)


def _floods(options: argparse.Namespace, host: PictureHost, target: Target) -> None:
    rows: list[tuple[str, ...]] = []
    with ExitStack() as stack:
        deployment = stack.enter_context(_deployment(options, target))
        stack.enter_context(running(host.serve))
        (url,) = stack.enter_context(service(deployment, options.out / "logs"))
        target = replace(target, port=int(url.rpartition(":")[2]))
        for name in options.only:
            asked = replace(target, regions=name == REGIONS)
            if name == SLOW_NAMES:
                # Whoever names no slow hosts names others.
                asked = replace(asked, host="fast{number}.example")
            rows.append(measure(name, asked, options.seconds, options.rest, options.nice))
            print(table(_HEAD, rows[-1:]).splitlines()[-1], flush=True)
    print(f"\n{options.commit or 'this tree'}\n" + table(_HEAD, rows))
    write_csv(options.out / f"flood-{options.commit or 'this'}.csv", _HEAD, rows)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    host = PictureHost()
    (grpc_port,) = free_ports(1)
    answers = _FORK.RawArray("q", 1000)
    target = Target(port=0, grpc_port=grpc_port, model=NAME, pictures=host.port, answers=answers)
    if _TOLD in options.only:
        options.only = [name for name in options.only if name != _TOLD]
        _told(options, host, answers)
    if options.only:
        _floods(options, host, target)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = usage.parser("benchmarks.flood", __doc__)
    parser.add_argument("--commit", help="measure the package of this commit of the repository")
    parser.add_argument("--only", nargs="+", choices=[*FLOODS, _TOLD], default=[*FLOODS, _TOLD], help="these")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each flood")
    parser.add_argument(
        "--nice", type=int, default=19, help="of the process that floods; as on another host: 19"
    )
    parser.add_argument("--rest", type=float, default=1.0, help="seconds from a flood to its last memory")
    parser.add_argument("--out", type=Path, default=Path("benchmarks-out"), help="CSV and logs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    # So that `timeout` leaves no worktree and no service behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    raise SystemExit(main())
