"""A runtime whose lease in etcd is gone says so, and discovery is asked before a new one is made."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tessera.errors import DiscoveryLost
from tessera.rpc import Client, Peers, RpcSettings, Runtime, Server, until_back
from tests.e2e.faults.stores import Etcd, Nats
from tests.rpc.conftest import Deployment, echoing
from tests.waiting import until

CONFIG = RpcSettings(namespace="lost", discovery_backend="etcd")


@pytest.fixture
def etcd(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Etcd]:
    server = Etcd(tmp_path)
    monkeypatch.setenv("ETCD_ENDPOINTS", server.url)
    monkeypatch.setenv("ETCD_LEASE_TTL", "4")
    yield server
    server.stop()


async def revoke_leases(etcd: Etcd) -> None:
    """What etcd does by itself when it has not heard of a process for long enough."""
    async with httpx.AsyncClient(base_url=etcd.url) as client:
        for lease in (await client.post("/v3/lease/leases", json={})).json()["leases"]:
            (await client.post("/v3/lease/revoke", json={"ID": lease["ID"]})).raise_for_status()


async def test_a_runtime_whose_lease_is_gone_says_so(etcd: Etcd) -> None:
    runtime = Runtime(CONFIG)
    lost = asyncio.ensure_future(runtime.lost())
    server = Server(runtime, runtime.address("embed"), echoing)
    await server.start()
    peers = Peers(await Client.connect(runtime, server.address), lambda _: None)
    assert await peers.wait(60)
    # Longer than a lease: it is renewed.
    await asyncio.sleep(5)
    assert not lost.done()
    await revoke_leases(etcd)
    assert isinstance(await asyncio.wait_for(lost, 60), DiscoveryLost)
    # Requests that wait for a worker need not wait for the rest of their time.
    await until(lambda: not peers.ready)
    waiting = asyncio.ensure_future(peers.wait(600))
    await asyncio.sleep(0)
    peers.expect_none()
    assert not await asyncio.wait_for(waiting, 60)
    assert not await peers.wait_back(600, 600)
    await peers.close()
    await asyncio.wait_for(server.stop(timeout=1), 60)
    runtime.shutdown()


async def test_a_removed_discovery_directory_is_a_loss(deployment: Deployment) -> None:
    server = await deployment.serve(echoing)
    runtime = deployment.runtime()
    lost = asyncio.ensure_future(runtime.lost())
    await asyncio.sleep(1)
    # Instances come and go in it.
    await server.stop(timeout=1)
    assert not lost.done()
    shutil.rmtree(deployment.store)
    (deployment.store / "v1" / "instances").mkdir(parents=True)
    assert isinstance(await asyncio.wait_for(lost, 60), DiscoveryLost)


# Registers while it watches for the end of its runtime.
_WATCHED = """
import asyncio
from tessera.rpc import RpcSettings, Runtime, Server, set_environment_defaults
from tests.rpc.conftest import echoing

async def main():
    runtime = Runtime(RpcSettings(namespace="watched", request_plane="nats"))
    starting = asyncio.ensure_future(Server(runtime, runtime.address("embed"), echoing).start())
    await asyncio.sleep(0)
    lost = asyncio.ensure_future(runtime.lost())
    await starting
    print("registered", lost.done())
    lost.cancel()
    runtime.shutdown()

set_environment_defaults()
asyncio.run(main())
"""


def test_a_runtime_is_watched_while_it_registers(store: Path, tmp_path: Path) -> None:
    """Over NATS an endpoint that was made meanwhile waited for a thread that waited for Python, for ever."""
    nats = Nats(tmp_path)
    # With one thread it happened every time.
    environment = os.environ | {"NATS_SERVER": nats.url, "DYN_RUNTIME_NUM_WORKER_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _WATCHED], env=environment, capture_output=True, text=True, timeout=180
        )
    finally:
        nats.stop()
    assert "registered False" in done.stdout, done.stderr


async def test_discovery_is_waited_for(etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    await asyncio.wait_for(until_back("etcd"), 60)
    await asyncio.wait_for(until_back("file"), 60)
    etcd.stop()
    # One server of a cluster is enough, with a scheme or without.
    monkeypatch.setenv("ETCD_ENDPOINTS", f"http://127.0.0.1:1, 127.0.0.1:{etcd.port}")
    waiting = asyncio.ensure_future(until_back("etcd"))
    await asyncio.sleep(1)
    assert not waiting.done()
    await asyncio.to_thread(etcd.start)
    await asyncio.wait_for(waiting, 60)
