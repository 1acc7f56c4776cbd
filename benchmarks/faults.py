"""``python -m benchmarks.faults``: how long clients feel that a worker was killed.

Starts two encode and two embed workers with ``launch/e_p.sh``, sends mixed requests at a steady ``--rate``,
kills one worker after another with SIGKILL, and reports for each when the p99 was back where it had been: no
higher than at any time in the ``--before`` seconds, and so until the next kill. Each p99 is that of
``--window`` answers in a row, so that one slow answer alone is not it. In the ``--control`` seconds of the
rows "nothing" nobody is killed: they show what chance does. ``--keep`` leaves what the table is made of, and
the service's own log, where times can be compared.
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

import httpx
import uvloop

from benchmarks import usage
from benchmarks.bodies import Bodies, HttpWorkload
from benchmarks.ports import free_ports
from benchmarks.table import table
from tessera.frontend.ready import workers
from tessera.models import open_model
from tessera.models.llama_nemotron_vl.random_checkpoint import main as make_checkpoint

_SCRIPT = Path(__file__).parent.parent / "launch" / "e_p.sh"
_MODEL = "benchmark"
_WHOLE = {"embed": 2, "encode": 2}
# In the order in which the script starts them.
_WORKERS = ("encode", "encode", "embed", "embed")
_WINDOW = 100


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
        "MODEL_PATH": str(model_path),
        "SERVED_MODEL_NAME": _MODEL,
        "DYN_HTTP_PORT": str(port),
        "DYN_SYSTEM_PORT_BASE": str(first),
        "ENCODE_WORKERS": "2",
        "EMBED_WORKERS": "2",
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
    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=1000)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        load = asyncio.create_task(_load(options, service.url, client, answers))
        await asyncio.sleep(options.warm)
        # What was slow at first says nothing of the level before the faults.
        answers.good.clear()
        await asyncio.sleep(options.before)
        # Until the p99 of what follows is known, and a while longer.
        calm = max(options.calm, 1.5 * options.window / options.rate)
        for _ in range(options.controls):
            kills.append(Kill(role="nothing", at=time.monotonic(), replaced=0.0))
            await asyncio.sleep(options.control)
        for worker in islice(cycle((2, 0, 3, 1)), options.kills):
            at = time.monotonic()
            os.kill(service.pid(worker), signal.SIGKILL)
            await _whole(service.url)
            kills.append(Kill(role=_WORKERS[worker], at=at, replaced=time.monotonic() - at))
            await asyncio.sleep(calm)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    return answers, kills


async def _whole(url: str) -> None:
    await asyncio.sleep(1.0)
    while True:
        if await asyncio.to_thread(workers, url) == _WHOLE:
            return
        await asyncio.sleep(0.1)


async def _load(options: argparse.Namespace, url: str, client: httpx.AsyncClient, answers: Answers) -> None:
    workload = HttpWorkload(name="faults", size=(512, 512), tokens=64, text_share=0.6)
    bodies = iter(Bodies(workload, open_model(options.model_path), _MODEL, seed=1))
    chance = random.Random(1)

    async def ask(body: bytes, due: float) -> None:
        try:
            answer = await client.post(f"{url}/v1/embeddings", content=body)
        except httpx.HTTPError as error:
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


def report(answers: Answers, kills: Sequence[Kill], window: int = _WINDOW) -> list[tuple[str, ...]]:
    level, back = recoveries(answers.good, [kill.at for kill in kills], window)
    ends = [*(kill.at for kill in kills[1:]), float("inf")]
    rows = []
    for kill, end, seconds in zip(kills, ends, back, strict=True):
        slowest = max((took for at, took in answers.good if kill.at <= at < end), default=float("nan"))
        row = (f"{slowest * 1e3:.0f}", f"{seconds:.1f}", f"{kill.replaced:.1f}")
        rows.append((kill.role, f"{level * 1e3:.0f}", *row))
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


def recoveries(
    answers: Sequence[tuple[float, float]], faults: Sequence[float], window: int = _WINDOW
) -> tuple[float, list[float]]:
    """The level of the p99 before the first fault, and the seconds from each fault until it is back there.

    ``answers`` are pairs of when an answer came and the seconds that it took. The p99 is that of ``window``
    answers in a row; its level is the worst one that is over before the first fault. It is back when it
    stays at that or below until the next fault. Both are nan where there are not so many answers.
    """
    ends = sorted(answers)
    p99s = [
        (ends[n][0], ends[n + window - 1][0], percentile([took for _, took in ends[n : n + window]], 0.99))
        for n in range(len(ends) - window + 1)
    ]
    level = max((p99 for _, last, p99 in p99s if last < faults[0]), default=float("nan"))
    back = []
    for fault, later in zip(faults, [*faults[1:], float("inf")], strict=True):
        own = [(first - fault, p99) for first, last, p99 in p99s if fault <= first and last < later]
        back.append(max([0.0, *(after for after, p99 in own if p99 > level)]) if own else float("nan"))
    return level, back


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank: of few values the p99 is the largest."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = usage.parser("benchmarks.faults", __doc__)
    parser.add_argument("--model-path", type=Path, help="a checkpoint; a small random one by default")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second; well below capacity")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--warm", type=float, default=5.0, help="seconds that are not looked at")
    parser.add_argument("--before", type=float, default=60.0, help="seconds that show the level")
    parser.add_argument("--controls", type=int, default=2, help="rows without a kill")
    parser.add_argument("--control", type=float, default=10.0, help="seconds of each of these")
    parser.add_argument("--window", type=int, default=_WINDOW, help="answers that a p99 is of")
    parser.add_argument("--calm", type=float, default=5.0, help="seconds after a worker is back, at least")
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
    head = ("killed", "p99 before, ms", "slowest after, ms", "p99 back after, s", "replaced after, s")
    print(table(head, report(answers, kills, options.window)))
    print(f"{len(answers.good)} answers, {len(answers.failed)} failed: {answers.failed[:3]}")


if __name__ == "__main__":
    main()
