"""``python -m tests.clients.fuzz``: damaged requests from several processes; no 5xx, no growth.

Needs the service's own packages and httpx, and a random checkpoint, which it makes. It starts the service
with ``launch/agg.sh`` (``--url`` takes one that runs), sends ``--cases`` requests and compares the memory,
the descriptors and the shared memory of every process after a third of them with those at the end.
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
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.clients.mutations import Mutator
from tests.e2e.service import launch

CLIENTS = 8
# Allocators keep some slack; a leak of one small image for each request would be many times this.
GROWTH_BYTES = 48 << 20
GROWTH_DESCRIPTORS = 24
ENVIRONMENT = {
    # Large blocks go back to the system at once, so that resident memory is what is in use.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
# A cache that is soon full, so that what grows after that is a leak.
ARGUMENTS = ("--multimodal-embedding-cache-capacity-gb", "0.02")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process holds: bytes resident, descriptors, bytes of shared memory that it maps."""

    resident: int
    descriptors: int
    shared: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = {
            line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "RssShmem"))
        }
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        return cls(int(fields["VmRSS"]) << 10, descriptors, int(fields["RssShmem"]) << 10)


def footprints(pids: Sequence[int]) -> dict[int, Footprint]:
    return {pid: Footprint.of(pid) for pid in pids}


def growth(before: dict[int, Footprint], after: dict[int, Footprint]) -> list[str]:
    """What grew beyond what is allowed."""
    found = []
    for pid, now in after.items():
        then = before[pid]
        for name, limit in (
            ("resident", GROWTH_BYTES),
            ("descriptors", GROWTH_DESCRIPTORS),
            ("shared", GROWTH_BYTES),
        ):
            more = getattr(now, name) - getattr(then, name)
            if more > limit:
                found.append(f"process {pid}: {name} grew by {more}, from {getattr(then, name)}")
    return found


async def send(url: str, key: str, *, seed: int, cases: int, hidden: int) -> Counter[int]:
    """Send so many requests; raises ``AssertionError`` naming one that gets a 5xx or no JSON."""
    mutator = Mutator(seed, hidden)
    statuses: Counter[int] = Counter()
    left = cases

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            path, body = mutator.request()
            answer = await http.post(path, content=body, headers={"content-type": "application/json"})
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (path, answer.text, body[:3000])
            if answer.headers["content-type"] == "application/json":
                answer.json()

    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as http:
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client(http))
        assert (await http.get("/health")).status_code == 200
    return statuses


def _work(job: tuple[str, str, int, int, int]) -> Counter[int]:
    url, key, seed, cases, hidden = job
    return asyncio.run(send(url, key, seed=seed, cases=cases, hidden=hidden))


def send_from(processes: int, url: str, key: str, *, seed: int, cases: int, hidden: int) -> Counter[int]:
    """The same from several processes, each with a seed of its own."""
    shares = [cases // processes + (number < cases % processes) for number in range(processes)]
    jobs = [(url, key, seed * 1000 + number, share, hidden) for number, share in enumerate(shares)]
    statuses: Counter[int] = Counter()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for found in pool.imap_unordered(_work, jobs):
            statuses += found
    return statuses


def width(url: str, key: str) -> int:
    answer = httpx.post(
        f"{url}/v1/embeddings", json={"input": "x"}, headers={"authorization": f"Bearer {key}"}, timeout=60
    )
    return len(answer.json()["data"][0]["embedding"])


@contextlib.contextmanager
def running() -> Iterator[tuple[str, Callable[[], list[int]]]]:
    from tessera.models.llama_nemotron_vl.random_checkpoint import main as make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "tessera-random"
        make_checkpoint(["--out", str(checkpoint), "--seed", "0"])
        log = Path(folder) / "log"
        with launch(
            "agg.sh", checkpoint, log, workers=1, arguments=ARGUMENTS, environment=ENVIRONMENT
        ) as service:
            yield service.url, service.pids


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", help="a service that runs, instead of one of our own")
    parser.add_argument("--pids", type=int, nargs="*", default=[], help="with --url: whose growth to look at")
    parser.add_argument("--key", default="none", help="with --url: an API key")
    parsed = parser.parse_args(argv)
    own = contextlib.nullcontext((parsed.url, lambda: parsed.pids)) if parsed.url else running()
    with own as (url, find_pids):
        hidden = width(url, parsed.key)
        started = time.monotonic()
        first = parsed.cases // 3
        rest = {"hidden": hidden, "seed": parsed.seed}
        statuses = send_from(parsed.processes, url, parsed.key, cases=first, **rest)
        # Not earlier: what waited for the service to be ready has ended by now.
        pids = find_pids()
        before = footprints(pids)
        rest["seed"] += 1
        statuses += send_from(parsed.processes, url, parsed.key, cases=parsed.cases - first, **rest)
        after = footprints(pids)
    report = {
        "cases": sum(statuses.values()),
        "seconds": round(time.monotonic() - started, 1),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "grown": growth(before, after),
        "resident_mib": {pid: [before[pid].resident >> 20, after[pid].resident >> 20] for pid in pids},
        "descriptors": {pid: [before[pid].descriptors, after[pid].descriptors] for pid in pids},
    }
    print(json.dumps(report, indent=2))
    return 1 if report["grown"] or sum(statuses.values()) != parsed.cases else 0


if __name__ == "__main__":
    sys.exit(main())
