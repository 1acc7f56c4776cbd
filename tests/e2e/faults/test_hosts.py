"""Hosts for the frontend with etcd, for an encode and for an embed worker, and the network between them."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.faults.network import Host, Network
from tests.e2e.faults.stores import Etcd
from tests.e2e.faults.test_processes import until
from tests.e2e.faults.traffic import PAUSE, Known, picture, traffic
from tests.e2e.inputs import parts
from tests.e2e.service import MODEL, ROOT, _metric, lasting_members
from tests.signals import default_signals
from tests.waiting import wait_until

pytestmark = pytest.mark.service

FRONT, ENCODE, EMBED = 1, 2, 3
DEADLINE = 10.0
OUTAGE = 15.0
PORT, METRICS = 8000, 8081


@dataclass(frozen=True, slots=True)
class Hosts:
    network: Network
    url: str

    def metric(self, host: int, name: str, **labels: str) -> float:
        return _metric(f"http://{self.network.hosts[host].address}:{METRICS}/metrics", name, labels)

    def workers(self) -> dict[str, int]:
        try:
            found: dict[str, int] = httpx.get(f"{self.url}/health", timeout=5).json()["workers"]
            return found
        except httpx.HTTPError:
            return {}


@pytest.fixture(scope="module")
def hosts(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    network = Network.create(3)
    folder = tmp_path_factory.mktemp("hosts")
    scripts: list[subprocess.Popen[bytes]] = []
    etcd = None
    try:
        front = network.hosts[FRONT]
        etcd = Etcd(folder, address=front.address, inside=front.command())
        for role, host in (
            ("TESSERA_FRONTENDS", FRONT),
            ("TESSERA_ENCODE_WORKERS", ENCODE),
            ("TESSERA_EMBED_WORKERS", EMBED),
        ):
            scripts.append(_launch(network.hosts[host], role, checkpoint, folder, etcd.url))
        made = Hosts(network, f"http://{network.hosts[FRONT].address}:{PORT}")
        wait_until(
            lambda: made.workers() == {"embed": 1, "encode": 1},
            240,
            said=lambda: [path.read_text() for path in folder.glob("*.log")],
        )
        yield made
    finally:
        network.calm()
        for script in scripts:
            os.killpg(script.pid, signal.SIGINT)
        for script in scripts:
            script.wait(timeout=60)
            assert not lasting_members(script.pid)
        if etcd is not None:
            etcd.stop()
        network.close()


def _launch(host: Host, role: str, checkpoint: Path, folder: Path, etcd: str) -> subprocess.Popen[bytes]:
    config = folder / f"{role}.yaml"
    config.write_text(f"transport: {{kind: nixl, nixl_interfaces: {host.device}, checksum: true}}\n")
    counts = dict.fromkeys(("TESSERA_FRONTENDS", "TESSERA_ENCODE_WORKERS", "TESSERA_EMBED_WORKERS"), "0") | {
        role: "1"
    }
    environment = counts | {
        "TESSERA_EXPECT_ENCODE_WORKERS": "1",
        "TESSERA_EXPECT_EMBED_WORKERS": "1",
        "TESSERA_MODEL_PATH": str(checkpoint),
        "TESSERA_SERVED_MODEL_NAME": MODEL,
        "DYN_DISCOVERY_BACKEND": "etcd",
        "ETCD_ENDPOINTS": etcd,
        "ETCD_LEASE_TTL": "4",
        "TESSERA_HOST": host.address,
        "TESSERA_PORT": str(PORT),
        "DYN_TCP_RPC_HOST": host.address,
        "DYN_TCP_RESPONSE_STREAM_HOST": host.address,
        "DYN_SYSTEM_HOST": host.address,
        "TESSERA_SYSTEM_PORT_BASE": str(METRICS),
        "TESSERA_ENCODE_ENGINE_ARGS": str(config),
        "TESSERA_EMBED_ENGINE_ARGS": str(config),
        "TESSERA_FRONTEND_ARGS": f"--request-timeout-seconds {DEADLINE}",
        "OMP_NUM_THREADS": "1",
    }
    # A cache of no images: every one is handed over.
    command = host.command(str(ROOT / "launch" / "e_p.sh"), "--multimodal-embedding-cache-capacity-gb", "0")
    with (folder / f"{role}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=default_signals,
        )


async def ask(hosts: Hosts, value: object) -> int:
    """The status of the answer."""
    async with httpx.AsyncClient(timeout=3 * DEADLINE) as client:
        body = {"model": MODEL, "input": [value]}
        answer = await client.post(f"{hosts.url}/v1/embeddings", json=body)
    return answer.status_code


def image(seed: int) -> object:
    made = parts(None, picture(seed))
    made[0]["image_url"]["url"] = "data:image/png;base64," + base64.b64encode(picture(seed)).decode()
    return made


async def right_again(hosts: Hosts, known: list[Known]) -> None:
    await until(lambda: hosts.workers() == {"embed": 1, "encode": 1})

    async def both() -> bool:
        return await ask(hosts, "a text") == await ask(hosts, image(1)) == 200

    await until(both)
    async with traffic([hosts.url], known, concurrency=3, pause=PAUSE) as running:
        await asyncio.sleep(2.0)
    assert running.errors == [] and running.vectors > 0


async def test_rows_cross_hosts_by_nixl_over_tcp(hosts: Hosts, known: list[Known]) -> None:
    await right_again(hosts, known)
    assert hosts.metric(EMBED, "tessera_transfers_total", route="nixl", outcome="ok") > 0
    assert hosts.metric(EMBED, "tessera_transfers_total", route="shm") == 0


async def test_a_slow_network_that_loses_packets_costs_time_alone(hosts: Hosts, known: list[Known]) -> None:
    for one, other in ((FRONT, EMBED), (FRONT, ENCODE), (ENCODE, EMBED)):
        weather = hosts.network.between(one, other)
        weather.delay, weather.loss = 0.03, 0.01
    try:
        async with traffic([hosts.url], known, concurrency=4, pause=0.05) as running:
            await asyncio.sleep(5.0)
    finally:
        hosts.network.calm()
    late = [error for error in running.errors if " 504: " not in error and " 503: " not in error]
    print(
        f"30 ms and 1 % loss between the hosts: {len(running.answered)} requests, {running.vectors} vectors"
    )
    assert late == [], late
    assert len(running.errors) <= 0.02 * len(running.answered) + 1


async def test_a_partition_of_the_workers_stops_images_alone(hosts: Hosts, known: list[Known]) -> None:
    await right_again(hosts, known)
    hosts.network.between(ENCODE, EMBED).parted = True
    try:
        answers = await asyncio.gather(*(ask(hosts, image(100 + seed)) for seed in range(4)))
        assert set(answers) <= {503, 504}
        assert await ask(hosts, "text goes on") == 200
    finally:
        hosts.network.calm()
    started = time.monotonic()
    await right_again(hosts, known)
    print(f"workers parted: whole again {time.monotonic() - started:.1f} s after the end")


async def test_a_host_that_is_cut_off_for_longer_than_its_lease_returns(
    hosts: Hosts, known: list[Known]
) -> None:
    await right_again(hosts, known)
    for other in (0, FRONT, ENCODE):
        hosts.network.between(EMBED, other).parted = True
    try:
        begun = time.monotonic()
        assert await ask(hosts, "nobody is there") in (503, 504)
        await asyncio.sleep(max(0.0, OUTAGE - (time.monotonic() - begun)))
    finally:
        hosts.network.calm()
    started = time.monotonic()
    await right_again(hosts, known)
    print(f"a host cut off for {OUTAGE} s: whole again {time.monotonic() - started:.1f} s after the end")
