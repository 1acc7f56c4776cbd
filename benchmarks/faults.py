"""``python -m benchmarks.faults``: how long clients feel that a worker was killed.

Starts two encode and two embed workers with ``launch/e_p.sh``, sends mixed requests at a steady ``--rate``,
kills one worker after another with SIGKILL, and reports how long answers took that came so many seconds after
a kill, beside those of the ``--before`` seconds in which nobody is killed. What a p99 of so few answers
reaches by chance stands in the last column: the highest of as many in a row in that time. ``--keep`` leaves
what the table is made of, and the service's own log, where times can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import math
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

import httpx2
import uvloop

from benchmarks import usage
from benchmarks.ports import free_ports
from benchmarks.recovery import Fault, felt
from tessera.launch.ready import workers
from tessera_tools.load.bodies import Bodies, HttpWorkload
from tessera_tools.load.words import CheckpointWords
from tessera_tools.random_checkpoint.checkpoint import main as make_checkpoint
from tessera_tools.table import table

_SCRIPT = Path(__file__).parent.parent / "launch" / "e_p.sh"
_MODEL = "benchmark"
_WHOLE = {"embed": 2, "encode": 2}
# In the order in which the script starts them.
_WORKERS = ("encode", "encode", "embed", "embed")


@dataclass(frozen=True, slots=True)
class Service:
    url: str
    script: int
    first_port: int

    def pid(self, worker: int) -> int:
        """The process of a worker, however often it was started again."""
        entry = f"DYN_SYSTEM_PORT={self.first_port + worker}".encode()
        for pid in Path(f"/proc/{self.script}/task/{self.script}/children").read_text().split():
            try:
                if entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return int(pid)
            except OSError:
                continue
        raise ProcessLookupError(f"worker {worker} is not there")


@dataclass(slots=True)
class Answers:
    """When each good answer came (``time.monotonic``) and its seconds since it was due; what went wrong."""

    good: list[tuple[float, float]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """``at`` is of ``time.monotonic``; after ``replaced`` seconds all workers were there again."""

    role: str
    at: float
    replaced: float


@contextmanager
def started(model_path: Path, log: Path) -> Iterator[Service]:
    port, first, *_ = free_ports(5)
    environment = os.environ | {
        "TESSERA_MODEL_PATH": str(model_path),
        "TESSERA_SERVED_MODEL_NAME": _MODEL,
        "TESSERA_PORT": str(port),
        "TESSERA_SYSTEM_PORT_BASE": str(first),
        "TESSERA_ENCODE_WORKERS": "2",
        "TESSERA_EMBED_WORKERS": "2",
    }
    with log.open("wb") as output:
        script = subprocess.Popen([_SCRIPT], env=environment, stdout=output, stderr=output)
    try:
        while b"tessera: ready at" not in log.read_bytes():
            if script.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.1)
        yield Service(f"http://127.0.0.1:{port}", script.pid, first)
    finally:
        script.terminate()
        script.wait(timeout=90)


async def measure(options: argparse.Namespace, service: Service) -> tuple[Answers, list[Kill]]:
    answers, kills = Answers(), []
    limits = httpx2.Limits(max_connections=1000, max_keepalive_connections=1000)
    async with httpx2.AsyncClient(limits=limits, timeout=60) as client:
        load = asyncio.create_task(_load(options, service.url, client, answers))
        await asyncio.sleep(options.warm)
        # What was slow at first says nothing of the level before the faults.
        answers.good.clear()
        await asyncio.sleep(options.before)
        for worker in islice(cycle((2, 0, 3, 1)), options.kills):
            at = time.monotonic()
            os.kill(service.pid(worker), signal.SIGKILL)
            await _whole(service.url)
            kills.append(Kill(role=_WORKERS[worker], at=at, replaced=time.monotonic() - at))
            await asyncio.sleep(options.calm)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    return answers, kills


async def _whole(url: str) -> None:
    await asyncio.sleep(1.0)
    while True:
        if await asyncio.to_thread(workers, url) == _WHOLE:
            return
        await asyncio.sleep(0.1)


async def _load(options: argparse.Namespace, url: str, client: httpx2.AsyncClient, answers: Answers) -> None:
    workload = HttpWorkload(name="faults", size=(512, 512), tokens=64, text_share=0.6)
    bodies = iter(Bodies(workload, CheckpointWords(options.model_path), _MODEL, seed=1))
    chance = random.Random(1)

    async def ask(body: bytes, due: float) -> None:
        try:
            answer = await client.post(f"{url}/v1/embeddings", content=body)
        except httpx2.HTTPError as error:
            answers.failed.append(repr(error))
            return
        now = time.monotonic()
        if answer.status_code == 200:
            answers.good.append((now, now - due))
        else:
            answers.failed.append(f"{answer.status_code}: {answer.text[:200]}")

    due = time.monotonic()
    async with asyncio.TaskGroup() as running:
        while True:
            due += chance.expovariate(options.rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            running.create_task(ask(next(bodies).data, due))


def report(answers: Answers, kills: Sequence[Kill]) -> list[tuple[str, ...]]:
    rows = []
    for row in felt(answers.good, [Fault(kill.role, kill.at) for kill in kills]):
        stretch = ""
        if row.kind != "nothing":
            stretch = (
                f"{row.since:.0f} to {row.until:.0f}" if row.until < math.inf else f"from {row.since:.0f}"
            )
        figures = (row.p50, row.p99, row.slowest, row.chance)
        milliseconds = ("" if math.isnan(each) else f"{each * 1e3:.0f}" for each in figures)
        rows.append((row.kind, stretch, str(row.answers), *milliseconds))
    return rows


def keep(folder: Path, answers: Answers, kills: Sequence[Kill]) -> None:
    """Write ``answers.csv`` and ``kills.csv``, with times as in the log: seconds of the Unix clock."""
    clock = time.time() - time.monotonic()
    with (folder / "answers.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("at", "milliseconds"))
        rows.writerows((f"{clock + at:.3f}", f"{took * 1e3:.1f}") for at, took in answers.good)
    with (folder / "kills.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("at", "killed", "replaced_after_seconds"))
        rows.writerows((f"{clock + kill.at:.3f}", kill.role, f"{kill.replaced:.2f}") for kill in kills)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = usage.parser("benchmarks.faults", __doc__)
    parser.add_argument("--model-path", type=Path, help="a checkpoint; a small random one by default")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second; well below capacity")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--warm", type=float, default=5.0, help="seconds that are not looked at")
    parser.add_argument("--before", type=float, default=60.0, help="seconds without a kill")
    parser.add_argument("--calm", type=float, default=8.0, help="seconds after a worker is back")
    parser.add_argument("--keep", type=Path, help="folder for answers.csv, kills.csv and the service's log")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.model_path is None:
            options.model_path = folder / "model"
            make_checkpoint(["--out", str(options.model_path), "--size", "tiny"])
        log = folder / "log"
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            log = options.keep / "service.log"
        service = stack.enter_context(started(options.model_path, log))
        answers, kills = uvloop.run(measure(options, service))
    if options.keep is not None:
        keep(options.keep, answers, kills)
    head = ("killed", "s after it", "answers", "p50, ms", "p99, ms", "slowest, ms", "p99 by chance, ms")
    print(table(head, report(answers, kills)))
    print("replaced after", ", ".join(f"{kill.role} {kill.replaced:.1f} s" for kill in kills))
    print(f"{len(answers.good)} answers, {len(answers.failed)} failed: {answers.failed[:3]}")


if __name__ == "__main__":
    main()
