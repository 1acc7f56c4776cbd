"""Mixed traffic with churn for a long time: every vector is right, and what lives on does not grow.

Three minutes by default; ``TESSERA_SOAK_SECONDS`` makes it longer (the promise is for half an hour).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.faults.traffic import Known, known_inputs, picture, traffic
from tests.e2e.inputs import parts
from tests.e2e.service import MODEL, Service, free_ports, launch
from tests.references.llama_nemotron_vl import Reference

SECONDS = float(os.environ.get("TESSERA_SOAK_SECONDS", "180"))

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(SECONDS + 300)]

# The processes that live through it, and those that are killed and restarted, in the script's order:
# frontends, encode workers, embed workers.
STEADY, CHURNED = (0, 2, 4), (1, 3, 5)


@dataclass(frozen=True, slots=True)
class Size:
    """What a process holds."""

    resident_mb: float
    files: int
    shared_memory: int

    @classmethod
    def of(cls, pid: int) -> Size:
        proc = Path(f"/proc/{pid}")
        pages = int((proc / "statm").read_text().split()[1])
        # Mapped once for its lease words and once for its rows: segments, not mappings, are counted.
        inodes = {line.split()[4] for line in (proc / "maps").read_text().splitlines() if "/memfd:" in line}
        return cls(pages * 4096 / (1 << 20), len(list((proc / "fd").iterdir())), len(inodes))


@dataclass(frozen=True, slots=True)
class Sample:
    sizes: tuple[Size, ...]
    registrations: tuple[float, ...]
    peers: float


@pytest.fixture(scope="module", params=["shm,inline", "nixl,inline"], ids=["shm", "nixl"])
def service(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("soak")
    config = folder / "engine.yaml"
    config.write_text(f"transport: {{kind: '{request.param}', checksum: true, lease_seconds: 3}}\n")
    port = free_ports(2)[0]
    environment = {
        "FRONTENDS": "2",
        "DYN_HTTP_PORT": str(port),
        "ENCODE_WORKERS": "2",
        "EMBED_WORKERS": "2",
        "ENCODE_ENGINE_ARGS": str(config),
        "EMBED_ENGINE_ARGS": str(config),
    }
    small = ("--multimodal-embedding-cache-capacity-gb", "0.0003")
    with launch(
        "e_p.sh", checkpoint, folder / "log", workers=4, arguments=small, environment=environment
    ) as running:
        yield Service(f"http://127.0.0.1:{port}", running.worker_ports, running.script, running.log)


def sample(service: Service) -> Sample:
    pids = service.pids_in_order(6)
    return Sample(
        tuple(Size.of(pids[position]) for position in STEADY),
        tuple(service.worker_metric(worker, "tessera_nixl_registrations") for worker in (0, 2)),
        service.worker_metric(2, "tessera_slab_peers"),
    )


async def churn(service: Service, stopping: asyncio.Event, chance: random.Random) -> int:
    """Kill, freeze or end one process after another, each once the one before it is back."""
    count = 0
    while not stopping.is_set():
        position = CHURNED[count % len(CHURNED)]
        pid = service.pids_in_order(6)[position]
        fault = chance.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP))
        os.kill(pid, fault)
        if fault == signal.SIGSTOP:
            await asyncio.sleep(chance.uniform(1.0, 4.0))
            os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + 60
        await asyncio.sleep(1.0)
        while -1 in service.pids_in_order(6) or not all_there(service):
            assert time.monotonic() < deadline, f"{service.pids_in_order(6)} {service.health()}"
            await asyncio.sleep(0.2)
        count += 1
        await asyncio.sleep(chance.uniform(0.5, 2.0))
    return count


def all_there(service: Service) -> bool:
    host, _, port = service.url.rpartition(":")
    try:
        return all(
            httpx.get(f"{host}:{int(port) + index}/health").json()["workers"] == {"embed": 2, "encode": 2}
            for index in (0, 1)
        )
    except httpx.HTTPError:
        return False


async def nuisance(service: Service, stopping: asyncio.Event, chance: random.Random) -> int:
    """Clients that hang up, and images that cannot be decoded."""
    count = 0
    async with httpx.AsyncClient(timeout=60) as client:
        while not stopping.is_set():
            data = picture(50_000 + count, 300)
            hangs_up = chance.random() < 0.5
            value = parts(None, data if hangs_up else data[: len(data) // 2])
            patience = httpx.Timeout(60, read=chance.uniform(0.001, 0.1) if hangs_up else 60)
            try:
                answer = await client.post(
                    f"{service.url}/v1/embeddings", json={"model": MODEL, "input": [value]}, timeout=patience
                )
                assert hangs_up or answer.status_code == 400, answer.text
            except httpx.ReadTimeout:
                pass
            count += 1
            await asyncio.sleep(0.1)
    return count


async def test_nothing_grows_and_every_vector_is_right(service: Service, reference: Reference) -> None:
    known: list[Known] = known_inputs(reference)
    host, _, port = service.url.rpartition(":")
    urls = [service.url, f"{host}:{int(port) + 1}"]
    stopping = asyncio.Event()
    chance = random.Random(7)
    seconds = SECONDS / 2
    async with traffic(urls, known) as running:
        # What is allocated once is there after a while; growth is measured from then on.
        await asyncio.sleep(min(30.0, seconds / 4))
        tasks = [
            asyncio.create_task(churn(service, stopping, chance)),
            asyncio.create_task(nuisance(service, stopping, chance)),
        ]
        samples: list[Sample] = []
        end = time.monotonic() + seconds - min(30.0, seconds / 4)
        while time.monotonic() < end and not any(task.done() for task in tasks):
            samples.append(await asyncio.to_thread(sample, service))
            await asyncio.sleep(1.0)
        stopping.set()
        faults, nuisances = await asyncio.gather(*tasks)
    last = samples[-1]
    print(
        f"{seconds:.0f} s: {len(running.answered)} requests, {running.vectors} vectors checked, "
        f"{faults} faults, {nuisances} bad clients, {len(running.errors)} errors"
    )
    for name, at in (("frontend", 0), ("encode worker", 1), ("embed worker", 2)):
        print(f"{name}: {samples[len(samples) // 4].sizes[at]} -> {last.sizes[at]}")
    print(f"NIXL registrations {samples[0].registrations} -> {last.registrations}, peers {last.peers}")
    assert running.errors == []
    assert faults >= 2 and running.vectors > 100
    quarter = len(samples) // 4
    for at in range(len(STEADY)):
        # The best of the last quarter against the best of the second: what comes and goes is left out.
        then, now = (
            [one.sizes[at] for one in samples[quarter : 2 * quarter]],
            [one.sizes[at] for one in samples[3 * quarter :]],
        )
        grown = min(size.resident_mb for size in now) - min(size.resident_mb for size in then)
        assert grown < 0.1 * then[0].resident_mb, (at, grown)
        assert min(size.files for size in now) <= min(size.files for size in then) + 4
        assert min(size.shared_memory for size in now) <= min(size.shared_memory for size in then) + 1
    assert last.registrations == samples[0].registrations
    assert last.peers <= 4
