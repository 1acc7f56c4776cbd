"""Mixed traffic with churn for a long time: every vector is right, and what lives on does not grow.

A minute and a half by default; ``TESSERA_SOAK_SECONDS`` makes it longer (the promise is for half an hour).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.faults.conftest import ENGINE, Deployment, deployed
from tests.e2e.faults.size import Size
from tests.e2e.faults.test_processes import whole
from tests.e2e.faults.traffic import PAUSE, Known, picture, traffic
from tests.e2e.inputs import parts
from tests.e2e.service import MODEL, Service
from tests.signals import signal_process
from tests.waiting import until

SECONDS = float(os.environ.get("TESSERA_SOAK_SECONDS", "96"))

pytestmark = [pytest.mark.soak, pytest.mark.service, pytest.mark.timeout(SECONDS + 400)]

# The processes that live through it, and those that are killed and restarted, in the script's order:
# frontends, encode workers, embed workers.
STEADY, CHURNED = (0, 2, 4), (1, 3, 5)
# It takes minutes until the allocators of torch and of the image library have all that they will ever hold.
MOST_GROWTH = 1.1 if SECONDS >= 600 else 1.35
NAMES = ("frontend", "encode worker", "embed worker")


@dataclass(frozen=True, slots=True)
class Stirred:
    """What was done to a service, and answered by it."""

    requests: int
    vectors: int
    faults: int
    bad_clients: int


@dataclass(frozen=True, slots=True)
class Sample:
    sizes: tuple[Size, ...]
    registrations: tuple[float, ...]
    peers: float


@pytest.fixture(
    params=[
        pytest.param("shm", marks=pytest.mark.xdist_group("faults")),
        pytest.param("nixl", marks=pytest.mark.xdist_group("soak-nixl")),
    ]
)
def soaked(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Iterator[Deployment]:
    """The service of the other tests, whose workers share memory, and one whose workers use NIXL."""
    if request.param == "shm":
        yield request.getfixturevalue("deployment")
        return
    with deployed(checkpoint, tmp_path, ENGINE % "'nixl,inline'") as running:
        yield running


def sample(service: Service) -> Sample:
    pids = service.pids_in_order(6)
    return Sample(
        tuple(Size.of(pids[position]) for position in STEADY),
        tuple(service.worker_metric(worker, "tessera_nixl_registrations") for worker in (0, 2)),
        service.worker_metric(2, "tessera_slab_peers"),
    )


async def churn(deployment: Deployment, stopping: asyncio.Event, chance: random.Random) -> int:
    """Kill, freeze or end one process after another, each once the one before it is back."""
    service, count = deployment.service, 0
    while not stopping.is_set():
        position = CHURNED[count % len(CHURNED)]
        pid = service.pids_in_order(6)[position]
        fault = chance.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP))
        signal_process(pid, fault)
        if fault == signal.SIGSTOP:
            await asyncio.sleep(chance.uniform(1.0, 4.0))
            signal_process(pid, signal.SIGCONT)
        # What has ended often is started again after up to half a minute.
        await asyncio.sleep(1.0)
        await until(
            lambda: -1 not in service.pids_in_order(6) and all_there(deployment.urls),
            said=lambda: f"{service.pids_in_order(6)} {service.health()}",
        )
        count += 1
        await asyncio.sleep(chance.uniform(0.5, 2.0))
    return count


def all_there(urls: Sequence[str]) -> bool:
    try:
        return all(httpx.get(f"{url}/health").json()["workers"] == {"embed": 2, "encode": 2} for url in urls)
    except httpx.HTTPError:
        return False


async def nuisance(url: str, stopping: asyncio.Event, chance: random.Random) -> int:
    """Clients that hang up, and images that cannot be decoded, at a frontend that lives on."""
    count = 0
    async with httpx.AsyncClient(timeout=60) as client:
        while not stopping.is_set():
            data = picture(50_000 + count, 300)
            hangs_up = chance.random() < 0.5
            value = parts(None, data if hangs_up else data[: len(data) // 2])
            patience = httpx.Timeout(60, read=chance.uniform(0.001, 0.1) if hangs_up else 60)
            try:
                answer = await client.post(
                    f"{url}/v1/embeddings", json={"model": MODEL, "input": [value]}, timeout=patience
                )
                assert hangs_up or answer.status_code == 400, answer.text
            except httpx.ReadTimeout:
                pass
            count += 1
            # Each picture costs 25 ms of both sides, more than a request of the traffic.
            await asyncio.sleep(0.1 if SECONDS >= 600 else PAUSE)
    return count


async def stir(deployment: Deployment, known: list[Known], seconds: float, chance: random.Random) -> Stirred:
    """Traffic, churn and bad clients for so long; nothing is left running."""
    stopping = asyncio.Event()
    # As many requests in a second of the short run as in the half hour, which has the processors to itself.
    pause = 0.0 if SECONDS >= 600 else PAUSE
    async with traffic(deployment.urls, known, pause=pause) as running:
        tasks = [
            asyncio.create_task(churn(deployment, stopping, chance)),
            asyncio.create_task(nuisance(deployment.urls[0], stopping, chance)),
        ]
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        stopping.set()
        faults, nuisances = await asyncio.gather(*tasks)
    assert running.errors == []
    return Stirred(len(running.answered), running.vectors, faults, nuisances)


def growth(then: Sample, now: Sample) -> list[str]:
    """What has grown by more than comes and goes."""
    found = []
    for name, before, after in zip(NAMES, then.sizes, now.sizes, strict=True):
        grown = (
            after.private_mb > MOST_GROWTH * before.private_mb,
            after.files > before.files + 4,
            after.shared_memory > before.shared_memory + 1,
        )
        if any(grown):
            found.append(f"{name}: {before} -> {after}")
    if now.registrations != then.registrations:
        found.append(f"NIXL registrations: {then.registrations} -> {now.registrations}")
    if now.peers > 4:
        found.append(f"peers: {now.peers}")
    return found


async def test_nothing_grows_and_every_vector_is_right(soaked: Deployment, known: list[Known]) -> None:
    chance = random.Random(7)
    await whole(soaked)
    # What is allocated once is there after a while; growth is measured from then on, always at rest.
    warm = await stir(soaked, known, SECONDS / 6, chance)
    await whole(soaked)
    then = await asyncio.to_thread(sample, soaked.service)
    stirred = await stir(soaked, known, SECONDS / 3, chance)
    await whole(soaked)

    async def as_before() -> Sample | None:
        now = await asyncio.to_thread(sample, soaked.service)
        return None if growth(then, now) else now

    # Connections to processes that are gone take their time to close.
    now = await until(as_before, said=lambda: growth(then, sample(soaked.service)))
    assert now is not None
    print(f"{SECONDS / 2:.0f} s: {warm}, then {stirred}, no errors")
    for name, before, after in zip(NAMES, then.sizes, now.sizes, strict=True):
        print(f"{name}: {before} -> {after}")
    print(f"NIXL registrations {then.registrations} -> {now.registrations}, peers {now.peers}")
    assert warm.faults + stirred.faults >= 2 and stirred.vectors > 50
