"""``python -m benchmarks.interpreter``: how much the interpreters of workers answer in a second.

Workers run alone: this process calls them as frontends do, each of ``--callers`` by connections of its own,
and neither engines nor decoders take processor time. A decoder sleeps for ``--decoding-ms`` in place of its
work, so that few cores stand for the many that decode elsewhere. Inputs are never seen before.
``--against`` compares with another commit, in turns (A B B A).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import uvloop
from PIL import Image

from benchmarks import cpu, usage
from benchmarks.cost import worktree
from benchmarks.free_family import SLEEP, installed
from benchmarks.ports import free_ports
from benchmarks.service import NAME
from tessera import wire
from tessera.models import Model, open_model
from tessera.models.base import Content, Truncate
from tessera.rpc import Client, Runtime, set_environment_defaults
from tessera.rpc.runtime import RpcSettings
from tessera_tools.load.bodies import jpeg
from tessera_tools.table import number, table

_ROOT: Final = Path(__file__).parent.parent
_ADDRESS: Final = "tessera.embed.generate"
_START_SECONDS: Final = 120.0
_TIMEOUT_MS: Final = 60_000


@contextmanager
def workers(count: int, checkpoint: Path, options: argparse.Namespace, tree: Path) -> Iterator[None]:
    """So many workers of the checkpoint, by the package of ``tree``."""
    stage = {"device": "cpu", "dtype": "bfloat16", "graph_cost": 0}
    engine = {
        "vision": {**stage, "max_batch_cost": options.batch, "max_queue_cost": 4096},
        "text": {**stage, "max_batch_cost": 16384, "max_queue_cost": 4 << 20},
        "preprocess": "processes",
        "preprocess_threads": max(1, options.decoders // count),
        "threads": 1,
    }
    flags = ["--model-path", str(checkpoint), "--served-model-name", NAME, "--disaggregation-mode", "agg"]
    flags += ["--multimodal-embedding-cache-capacity-gb", "0", "--override-engine-args", json.dumps(engine)]
    environment = os.environ | {SLEEP: str(options.decoding_ms / 1e3)}
    if tree != _ROOT:
        paths = (os.environ["PYTHONPATH"].split(os.pathsep)[0], str(_ROOT), str(tree / "components/src"))
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    processes = []
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        for index, port in enumerate(free_ports(count)):
            with (options.out / f"worker-{index}.log").open("wb") as log:
                own = environment | {"DYN_SYSTEM_PORT": str(port)}
                command = [sys.executable, "-m", "tessera.worker", *flags]
                processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Requests:
    """Makes requests of one kind that no cache has seen."""

    def __init__(self, model: Model, kind: str) -> None:
        self._plan = model.plan(512, 512, param="image") if kind == "image" else None
        # As the load of the other benchmarks has them: 45 kB.
        pixels = np.random.default_rng(0).integers(0, 256, (33, 33, 3), np.uint8)
        self._data = jpeg(Image.fromarray(pixels).resize((512, 512), Image.Resampling.BICUBIC))
        content = Content(parts=("a word " * 15 if self._plan is None else self._plan,))
        prompt = model.prompt(content, max_tokens=64, truncate=Truncate.END, param="input")
        self._tokens = prompt.tokens.tobytes()

    def next(self) -> wire.EmbedRequest:
        images: tuple[wire.Image, ...] = ()
        if (plan := self._plan) is not None:
            digest = secrets.token_bytes(32)
            images = (
                wire.Image(
                    digest=digest,
                    data=self._data,
                    units=plan.units,
                    rows=plan.rows,
                    grid=plan.grid,
                    param="image",
                ),
            )
        item = wire.Item(tokens=self._tokens, images=images, param="input")
        return wire.EmbedRequest(request_id=secrets.token_hex(8), items=(item,), timeout_ms=_TIMEOUT_MS)


class Flow:
    """Answers a second, their seconds, and what the workers and their decoders spent meanwhile."""

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.timings: list[wire.Timings] = []
        self.sent = self.received = 0
        self.spent: cpu.Parts = {}
        self.waits: cpu.Parts = {}
        self.seconds = 0.0

    def add(self, other: Flow) -> None:
        self.latencies += other.latencies
        self.timings += other.timings
        self.sent += other.sent
        self.received += other.received
        self.seconds += other.seconds
        for own, others in ((self.spent, other.spent), (self.waits, other.waits)):
            for part, more in others.items():
                own[part] = own.get(part, 0.0) + more

    async def drive(self, clients: Sequence[Client], requests: Requests, options: argparse.Namespace) -> None:
        ends = time.monotonic() + options.warm
        measuring = False

        async def ask(index: int) -> None:
            client = clients[index % len(clients)]
            instances = client.instances()
            turn = index
            while time.monotonic() < ends or not measuring:
                turn += 1
                if options.pause_ms:
                    await asyncio.sleep(random.expovariate(1e3 / options.pause_ms))
                began = time.perf_counter()
                call = client.call(instances[turn % len(instances)], requests.next(), timeout=60)
                reply = await call
                if measuring:
                    assert isinstance(reply, wire.EmbedReply) and not reply.failures, reply
                    self.latencies.append(time.perf_counter() - began)
                    self.timings.append(reply.timings)

        async def watch() -> None:
            nonlocal measuring, ends
            await asyncio.sleep(options.warm)
            meter = cpu.Meter()
            ends = time.monotonic() + options.seconds
            measuring = True
            processes = cpu.service_processes(os.getpid())
            before = cpu.waits(processes)
            meter.begin()
            with self._counted():
                await asyncio.sleep(options.seconds)
            meter.end()
            self.waits = {part: count - before[part] for part, count in cpu.waits(processes).items()}
            self.seconds, self.spent = meter.seconds, meter.spent

        await asyncio.gather(watch(), *(ask(index) for index in range(options.at_once)))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the messages of this process, those with requests and those with replies."""
        encode, decode = wire.encode, wire.decode_replies

        def sent(message: wire.Message) -> bytes:
            self.sent += 1
            return encode(message)

        def received(payload: bytes) -> wire.Replies | wire.Failure | wire.Piece:
            self.received += 1
            return decode(payload)

        wire.encode, wire.decode_replies = sent, received  # type: ignore[assignment]
        try:
            yield
        finally:
            wire.encode, wire.decode_replies = encode, decode

    def row(self) -> tuple[str, ...]:
        """Images a second, p50 in ms, and ms of an image: of its stages, and of processors by part."""
        count = len(self.latencies)
        stages = [
            statistics.median(getattr(one, name) for one in self.timings)
            for name in ("preprocess_ms", "queue_ms", "encode_ms", "embed_ms")
        ]
        p50 = statistics.median(self.latencies) * 1e3
        together = (count / max(1, self.sent), count / max(1, self.received))
        return tuple(map(number, (count / self.seconds, p50, *stages, *together)))

    def each(self, of: cpu.Parts, scale: float = 1.0) -> dict[str, float]:
        """What is counted by part, of an input."""
        return {
            f"{process}, {part}": count * scale / len(self.latencies) for (process, part), count in of.items()
        }


def _run(checkpoint: Path, count: int, tree: Path, options: argparse.Namespace) -> Flow:
    flow, requests = Flow(), Requests(open_model(checkpoint), options.input)
    with tempfile.TemporaryDirectory() as store:
        os.environ["DYN_FILE_KV"] = store
        with workers(count, checkpoint, options, tree):
            uvloop.run(_flow(flow, requests, count, options))
    return flow


async def _flow(flow: Flow, requests: Requests, count: int, options: argparse.Namespace) -> None:
    set_environment_defaults()
    runtime = Runtime(RpcSettings())
    clients = [await Client.connect(runtime, _ADDRESS) for _ in range(options.callers)]
    deadline = time.monotonic() + _START_SECONDS
    while any(len(client.instances()) < count for client in clients):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {count} workers after {_START_SECONDS:.0f} s; see {options.out}")
        await asyncio.sleep(0.1)
    try:
        await flow.drive(clients, requests, options)
    finally:
        runtime.shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    with ExitStack() as stack:
        checkpoint = stack.enter_context(installed(family=options.family))
        trees = {"this": _ROOT}
        if options.against:
            trees = {options.against: stack.enter_context(worktree(options.against)), "this": _ROOT}
        flows: dict[tuple[int, str], Flow] = {}
        for count in options.workers:
            for name in [*trees, *reversed(trees)] if options.against else trees:
                flow = flows.setdefault((count, name), Flow())
                # A process of its own: Dynamo's runtime is of one.
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    flow.add(pool.apply(_run, (checkpoint, count, trees[name], options)))
                print(count, name, *flow.row(), flush=True)
    header = ("workers", "commit", "a second", "p50 ms", "decode ms", "queue ms", "vision ms", "text ms")
    header += ("requests a message", "replies a message")
    print("\n" + table(header, [(str(count), name, *flow.row()) for (count, name), flow in flows.items()]))
    columns = [f"{count} {name}" for count, name in flows]
    spent = [flow.each(flow.spent, 1e3) for flow in flows.values()]
    waits = [flow.each(flow.waits) for flow in flows.values()]
    for what, counts in (("CPU ms of an input", spent), ("waits of an input", waits)):
        parts = dict.fromkeys(part for each in counts for part, count in each.items() if count > 0.005)
        rows = [(part, *(f"{each.get(part, 0.0):.3f}" for each in counts)) for part in parts]
        print("\n" + table((what, *columns), rows))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = usage.parser("benchmarks.interpreter", __doc__)
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit of the repository")
    parser.add_argument("--family", default="clip", help="whose prompts and images are measured")
    parser.add_argument("--input", choices=("image", "text"), default="image")
    parser.add_argument("--workers", type=int, nargs="+", default=[1], help="beside each other")
    parser.add_argument("--decoders", type=int, default=12, help="of all workers together")
    parser.add_argument("--decoding-ms", type=float, default=4.0, help="that a decoder sleeps for an image")
    parser.add_argument("--batch", type=int, default=64, help="images of a batch")
    parser.add_argument("--at-once", type=int, default=128, help="requests")
    parser.add_argument("--callers", type=int, default=6, help="in place of frontends")
    parser.add_argument(
        "--pause-ms", type=float, default=0.0, help="mean time between an answer and the next request"
    )
    parser.add_argument("--warm", type=float, default=1.5, help="seconds before the window")
    parser.add_argument("--seconds", type=float, default=5.0, help="the window")
    parser.add_argument("--out", type=Path, default=Path("benchmarks-out/interpreter"), help="logs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    # So that `timeout` leaves no worktree and no worker behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    raise SystemExit(main())
