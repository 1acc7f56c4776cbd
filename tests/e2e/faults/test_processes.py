"""Processes are killed, frozen and restarted under load, and no client sees an error."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.e2e.faults.conftest import EMBED, ENCODE, FRONTENDS, Deployment
from tests.e2e.faults.traffic import PAUSE, Known, traffic
from tests.e2e.service import MODEL, Service
from tests.signals import freeze, signal_process

pytestmark = [pytest.mark.xdist_group("faults"), pytest.mark.service, pytest.mark.timeout(600)]

WAIT = 90.0


async def until(condition, timeout: float = WAIT, what: str = "") -> None:  # type: ignore[no-untyped-def]
    """Wait for it; a process that does not answer yet is as good as false.

    Each time for longer: what asks a service takes 10 ms of processor time, a fifth of a processor at first.
    """
    deadline, pause = time.monotonic() + timeout, 0.05
    while True:
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, what
        await asyncio.sleep(pause)
        pause = min(1.5 * pause, 0.3)


async def whole(deployment: Deployment) -> None:
    """Both frontends see every worker, and nothing of what has happened is left in any of them."""

    def complete() -> bool:
        for url in deployment.urls:
            try:
                body = httpx.get(f"{url}/health").json()
            except httpx.HTTPError:
                return False
            if body["workers"] != {"embed": 2, "encode": 2} or body["missing"] != {"embed": 0, "encode": 0}:
                return False
        return True

    await until(complete, what="a process did not come back")
    await idle(deployment.service, encode=ENCODE, embed=EMBED)


async def idle(service: Service, *, encode: Sequence[int], embed: Sequence[int]) -> None:
    """Nothing is admitted, queued, lent or under way: no frontend, and no worker at these positions."""
    for worker in encode:
        for name in ("tessera_slab_leases", "tessera_slab_used_bytes", "tessera_slab_waiting"):
            await until(lambda w=worker, n=name: not service.worker_metric(w, n), what=f"{name} of {worker}")
        await until(lambda w=worker: not service.worker_metric(w, "tessera_units_in_flight"))
    for worker in embed:
        for name in ("tessera_tokens_in_flight", "tessera_queued"):
            await until(lambda w=worker, n=name: not service.worker_metric(w, n), what=f"{name} of {worker}")
    for name in ("tessera_admitted_tokens", "tessera_admitted_response_bytes", "tessera_requests_in_flight"):
        await until(lambda n=name: not service.frontend_metric(n), what=name)


async def whole_again(deployment: Deployment) -> None:
    await asyncio.to_thread(deployment.service.wait_workers, 2, 2, WAIT)


async def test_workers_killed_one_after_another_are_not_noticed(
    deployment: Deployment, known: list[Known]
) -> None:
    await whole(deployment)
    async with traffic(deployment.urls, known, pause=PAUSE) as running:
        await asyncio.sleep(2.0)
        faults = []
        for worker in (EMBED[0], ENCODE[0], EMBED[1], ENCODE[1]):
            pid = named(deployment, worker)
            faults.append(time.monotonic())
            signal_process(pid, signal.SIGKILL)
            # The dead one stays listed until its lease runs out: the new one is what counts.
            await asyncio.sleep(1.0)
            await until(lambda p=pid, w=worker: replaced(deployment, w, p), what="it was not started again")
            await whole_again(deployment)
    assert running.errors == [] and running.scores
    running.figures("four workers killed in turn", faults[0])
    await whole(deployment)


def named(deployment: Deployment, worker: int) -> int:
    """The process of a worker by the port in its environment, however often it was started again."""
    port = f"DYN_SYSTEM_PORT={deployment.service.worker_ports[worker]}".encode()
    for pid in deployment.service.pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as environ:
                if port in environ.read().split(b"\0"):
                    return pid
        except OSError:
            continue
    return -1


def replaced(deployment: Deployment, worker: int, old: int) -> bool:
    return named(deployment, worker) not in (-1, old)


async def test_frozen_workers_are_routed_around_and_come_back(
    deployment: Deployment, known: list[Known]
) -> None:
    await whole(deployment)
    frozen = [named(deployment, worker) for worker in (EMBED[0], ENCODE[0])]
    async with traffic(deployment.urls, known, pause=PAUSE) as running:
        await asyncio.sleep(2.0)
        first = time.monotonic()
        for pid in frozen:
            freeze(pid)
        try:
            # Longer than the ten seconds that their leases in discovery last.
            await asyncio.sleep(14.0)
            served = len(running.answered)
        finally:
            for pid in frozen:
                signal_process(pid, signal.SIGCONT)
        await whole_again(deployment)
        items = [deployment.service.worker_metric(worker, "tessera_items_total") for worker in (2, 0)]
        await asyncio.sleep(2.0)
        assert len(running.answered) > served
        for worker, before in zip((2, 0), items, strict=True):
            await until(
                lambda w=worker, b=before: deployment.service.worker_metric(w, "tessera_items_total") > b
            )
    assert running.errors == []
    assert [named(deployment, worker) for worker in (EMBED[0], ENCODE[0])] == frozen
    running.figures("an embed and an encode worker frozen for 14 s", first)
    await whole(deployment)


async def test_a_rolling_restart_of_every_process_loses_nothing(
    deployment: Deployment, known: list[Known]
) -> None:
    await whole(deployment)
    async with traffic(deployment.urls, known, pause=PAUSE) as running:
        await asyncio.sleep(1.0)
        faults = []
        for position in range(6):
            pid = deployment.service.pids_in_order(6)[position]
            faults.append(time.monotonic())
            signal_process(pid, signal.SIGTERM)
            await until(lambda p=pid: f"(pid {p}) ended with status" in deployment.service.log.read_text())
            await until(lambda p=pid, at=position: deployment.service.pids_in_order(6)[at] not in (-1, p))
            for url in deployment.urls:
                await until(lambda u=url: health(u) == {"embed": 2, "encode": 2})
            assert f"(pid {pid}) ended with status 0" in deployment.service.log.read_text()
    assert running.errors == []
    running.figures("every process restarted in turn", faults[0])
    await whole(deployment)


def health(url: str) -> dict[str, int]:
    try:
        workers: dict[str, int] = httpx.get(f"{url}/health").json()["workers"]
        return workers
    except httpx.HTTPError:
        return {}


async def test_a_frontend_that_is_killed_leaves_its_work_undone(
    deployment: Deployment, known: list[Known]
) -> None:
    await whole(deployment)
    victim = deployment.service.pids_in_order(6)[FRONTENDS[1]]
    body = {"model": MODEL, "input": [f"{index} " + "many words " * 200 for index in range(64)]}
    cancelled = sum(cancelled_items(deployment, worker) for worker in EMBED)
    async with (
        traffic(deployment.urls, known, pause=PAUSE) as running,
        httpx.AsyncClient(timeout=60) as client,
    ):
        calls = [
            asyncio.create_task(client.post(f"{deployment.urls[1]}/v1/embeddings", json=body))
            for _ in range(8)
        ]
        # They are with the workers by the time that some of their tokens have been taken.
        await until(
            lambda: (
                sum(deployment.service.worker_metric(w, "tessera_tokens_in_flight") for w in EMBED) > 20_000
            )
        )
        first = time.monotonic()
        signal_process(victim, signal.SIGKILL)
        lost = await asyncio.gather(*calls, return_exceptions=True)
        assert any(isinstance(one, httpx.TransportError) for one in lost)
        await until(lambda: sum(cancelled_items(deployment, worker) for worker in EMBED) > cancelled)
        await until(lambda: health(deployment.urls[1]) == {"embed": 2, "encode": 2})
    assert running.errors == []
    running.figures("one of two frontends killed", first)
    await whole(deployment)


def cancelled_items(deployment: Deployment, worker: int) -> float:
    return deployment.service.worker_metric(worker, "tessera_items_total", stage="embed", outcome="cancelled")


def store_of(service: Service) -> Path:
    """The discovery directory."""
    environment = Path(f"/proc/{service.pids()[0]}/environ").read_bytes().decode().split("\0")
    return Path(next(entry for entry in environment if entry.startswith("DYN_FILE_KV="))[12:])


def forget_embed_workers(service: Service) -> int:
    """Delete the embed workers from the discovery directory; how many there were."""
    listed = [path for path in store_of(service).rglob("*") if path.is_file() and "embed" in path.name]
    for path in listed:
        path.unlink()
    return len(listed)


async def test_workers_that_discovery_has_lost_return(deployment: Deployment, known: list[Known]) -> None:
    await whole(deployment)
    async with traffic(deployment.urls, known, pause=PAUSE) as running:
        await asyncio.sleep(1.0)
        first = time.monotonic()
        # One that was killed is listed until its lease runs out.
        assert forget_embed_workers(deployment.service) >= 2
        await until(lambda: health(deployment.urls[0]) == {"embed": 0, "encode": 2})
        await until(lambda: health(deployment.urls[0]) == {"embed": 2, "encode": 2})
        await asyncio.sleep(1.0)
    assert running.errors == []
    running.figures("every embed worker lost from discovery", first)
    await whole(deployment)


async def test_a_missing_worker_shows(deployment: Deployment) -> None:
    await whole(deployment)
    pid = named(deployment, EMBED[0])
    freeze(pid)
    try:
        await until(lambda: deployment.service.health()["missing"] == {"embed": 1, "encode": 0})
        assert deployment.service.frontend_metric("tessera_workers_expected", component="embed") == 2
        # Another frontend than the one above may answer; each finds out for itself.
        await until(lambda: deployment.service.frontend_metric("tessera_workers", component="embed") == 1)
        assert deployment.service.health()["status"] == "ready"
    finally:
        signal_process(pid, signal.SIGCONT)
    await whole(deployment)
