"""``python -m tests.clients.fuzz``: damaged requests from several processes; no 5xx, no growth.

Needs the service's own packages and httpx, and a random checkpoint, which it makes. It starts the service
with ``launch/agg.sh`` (``--url`` takes one that runs) and sends ``--cases`` requests in chunks, each with a
seed of its own. After each it prints one line of JSON with the statuses so far and what every process of the
service holds; with ``--results FILE`` the chunks are kept there, and those that it holds already are left
out. What the processes hold at least (memory, descriptors, shared memory) in the last third of the chunks is
compared with the second third.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from tests.clients.footprint import Footprint, floor, footprints, growth
from tests.clients.mutations import Mutator
from tests.e2e.service import launch

CLIENTS = 8
ENVIRONMENT = {
    # Large blocks go back to the system at once, so that resident memory is what is in use.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    # One line for each case is what a log is for, but nobody reads these.
    "TESSERA_LOG_LEVEL": "warning",
}
# A cache that is soon full, so that what grows after that is a leak.
ARGUMENTS = ("--multimodal-embedding-cache-capacity-gb", "0.02")
# The service is full when many clients are faster than it is; they come back, so that every case is tried.
_MOST_REFUSALS = 600


@dataclass(slots=True)
class Outcome:
    """How the cases of one seed were answered; ``failures`` names those that got a 5xx or no JSON."""

    seed: int
    statuses: Counter[int] = field(default_factory=Counter)
    refused: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return self.statuses.total()


async def send(url: str, key: str, *, seed: int, cases: int, hidden: int) -> Outcome:
    """Send so many requests, a few at a time."""
    mutator = Mutator(seed, hidden)
    outcome = Outcome(seed)
    sent = 0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal sent
        while sent < cases:
            number, (path, body) = sent, mutator.request()
            sent += 1
            answer = await _post(http, path, body, outcome)
            outcome.statuses[answer.status_code] += 1
            if fault := _fault(answer):
                outcome.failures.append(
                    f"case {number} of seed {seed}: {fault}: {answer.text[:500]} to {path} {body[:3000]!r}"
                )

    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as http:
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client(http))
        assert (await http.get("/health")).status_code == 200
    return outcome


async def _post(http: httpx.AsyncClient, path: str, body: bytes, outcome: Outcome) -> httpx.Response:
    for _ in range(_MOST_REFUSALS):
        answer = await http.post(path, content=body)
        if answer.status_code != 429:
            break
        outcome.refused += 1
        await asyncio.sleep(float(answer.headers["retry-after"]))
    return answer


def _fault(answer: httpx.Response) -> str | None:
    if answer.status_code >= 500:
        return f"answered {answer.status_code}"
    if answer.headers["content-type"] == "application/json":
        try:
            answer.json()
        except ValueError:
            return "the answer is no JSON"
    return None


def _work(job: tuple[str, str, int, int, int]) -> Outcome:
    url, key, seed, cases, hidden = job
    return asyncio.run(send(url, key, seed=seed, cases=cases, hidden=hidden))


def width(url: str, key: str) -> int:
    answer = httpx.post(
        f"{url}/v1/embeddings", json={"input": "x"}, headers={"authorization": f"Bearer {key}"}, timeout=60
    )
    return len(answer.json()["data"][0]["embedding"])


@contextlib.contextmanager
def running() -> Iterator[tuple[str, Callable[[], list[int]]]]:
    from tessera_tools.random_checkpoint.checkpoint import main as make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "tessera-random"
        make_checkpoint(["--out", str(checkpoint), "--seed", "0"])
        log = Path(folder) / "log"
        with launch(
            "agg.sh", checkpoint, log, workers=1, arguments=ARGUMENTS, environment=ENVIRONMENT
        ) as service:
            yield service.url, service.pids


@dataclass(slots=True)
class Tally:
    """The chunks so far, those of earlier runs among them, and what the service held after each."""

    file: Path | None
    started: float = field(default_factory=time.monotonic)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    refused: int = 0
    seeds: set[int] = field(default_factory=set)
    held: list[dict[int, Footprint]] = field(default_factory=list)

    def read(self) -> None:
        """Count what an earlier run left in the file."""
        if self.file is not None and self.file.exists():
            for line in self.file.read_text().splitlines():
                self._add(json.loads(line)["chunk"])

    def add(self, outcome: Outcome, pids: Sequence[int]) -> None:
        chunk = asdict(outcome) | {"statuses": {str(key): value for key, value in outcome.statuses.items()}}
        self._add(chunk)
        self.held.append(footprints(pids))
        held = {pid: asdict(footprint) for pid, footprint in self.held[-1].items()}
        if self.file is not None:
            with self.file.open("a") as file:
                print(json.dumps({"chunk": chunk, "held": held}), file=file)
        print(json.dumps(self.report() | {"failures": outcome.failures}), flush=True)

    def report(self) -> dict[str, object]:
        held = self.held[-1] if self.held else {}
        return {
            "cases": self.statuses.total(),
            "seconds": round(time.monotonic() - self.started, 1),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "refused_and_sent_again": self.refused,
            "resident_mib": {pid: footprint.resident >> 20 for pid, footprint in held.items()},
            "descriptors": {pid: footprint.descriptors for pid, footprint in held.items()},
            "shared_mib": {pid: footprint.shared >> 20 for pid, footprint in held.items()},
        }

    def grown(self) -> list[str]:
        """The last third compared with the second: in the first, caches and allocators are still filling."""
        third = max(1, len(self.held) // 3)
        return growth(floor(self.held[third:-third] or self.held[:1]), floor(self.held[-third:]))

    def _add(self, chunk: dict[str, object]) -> None:
        found = chunk["statuses"]
        assert isinstance(found, dict) and isinstance(chunk["failures"], list)
        self.statuses.update({int(status): count for status, count in found.items()})
        self.failures += chunk["failures"]
        self.refused += int(str(chunk["refused"]))
        self.seeds.add(int(str(chunk["seed"])))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--chunk", type=int, default=1000, help="cases for each seed")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument(
        "--seed", type=int, default=1_000_000, help="of the first chunk; the next ones count up"
    )
    parser.add_argument(
        "--results", type=Path, help="a file that keeps the chunks; a later run goes on there"
    )
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="begin no chunk after that time; 0: no limit"
    )
    parser.add_argument("--url", help="a service that runs, instead of one of our own")
    parser.add_argument("--pids", type=int, nargs="*", default=[], help="with --url: whose growth to look at")
    parser.add_argument("--key", default="none", help="with --url: an API key")
    parsed = parser.parse_args(argv)
    tally = Tally(parsed.results)
    tally.read()
    chunks = {
        parsed.seed + number: min(parsed.chunk, parsed.cases - number * parsed.chunk)
        for number in range(-(-parsed.cases // parsed.chunk))
    }
    own = contextlib.nullcontext((parsed.url, lambda: parsed.pids)) if parsed.url else running()
    with own as (url, find_pids), multiprocessing.get_context("spawn").Pool(parsed.processes) as pool:
        hidden = width(url, parsed.key)
        jobs = (
            (url, parsed.key, seed, cases, hidden)
            for seed, cases in chunks.items()
            if seed not in tally.seeds
        )
        until = time.monotonic() + (parsed.minutes * 60 or float("inf"))
        # A process at a time takes one, so that no chunk is begun long before it is sent.
        while batch := [job for _, job in zip(range(parsed.processes), jobs, strict=False)]:
            for outcome in pool.imap_unordered(_work, batch):
                tally.add(outcome, find_pids())
            if time.monotonic() > until:
                break
    grown = tally.grown()
    print(json.dumps(tally.report() | {"grown": grown, "failures": tally.failures}, indent=2))
    return 1 if grown or tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
