"""A process asks to be replaced while a background loop keeps failing, and is whole afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from benchmarks.ports import free_ports
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import wait_until

pytestmark = pytest.mark.service

# Its list of instances cannot be had while the file is there.
FRONTEND = """
import sys
from pathlib import Path
from tessera.frontend.__main__ import main
from tessera.rpc import Client
from tessera.tasks import KEEPER

odd, instances = Path(sys.argv.pop(1)), Client.instances

def failing(client):
    if odd.exists():
        raise RuntimeError("odd")
    return instances(client)

Client.instances = failing
KEEPER.first_pause = KEEPER.longest_pause = 0.1
sys.exit(main())
"""

WORKER = """
import asyncio, signal, sys
from pathlib import Path
from tessera.rpc import RpcSettings, Runtime, Server, set_environment_defaults
from tessera.tasks import KEEPER
from tessera.worker.metrics import WorkerMetrics
from tests.rpc.conftest import echoing

odd = Path(sys.argv[1])

class Listing:
    def __init__(self, client):
        self.client = client

    def instance_ids(self):
        if odd.exists():
            raise RuntimeError("odd")
        return self.client.instance_ids()

class OddRuntime(Runtime):
    async def follow(self, address):
        return Listing(await super().follow(address))

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    KEEPER.first_pause = KEEPER.longest_pause = 0.1
    runtime = OddRuntime(RpcSettings(namespace="odd"))
    server = Server(runtime, runtime.address("embed"), echoing)
    server.expose_metrics(WorkerMetrics().render)
    await server.start(check_every=0.1)
    await stop.wait()
    await server.stop(timeout=1)
    runtime.shutdown()

set_environment_defaults()
asyncio.run(main())
"""


@contextmanager
def process(script: str, *arguments: str, log: Path, **environment: str) -> Iterator[None]:
    with log.open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, "-c", script, *arguments], env=os.environ | environment, stderr=output
        )
    try:
        yield
        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=60) == 0, log.read_text()
    finally:
        started.kill()
        started.wait()


def failures(url: str, loop: str) -> float:
    found = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return sum(
        sample.value
        for family in found
        for sample in family.samples
        if sample.name == "tessera_loop_failures_total" and sample.labels["loop"] == loop
    )


def status(url: str) -> int:
    try:
        return httpx.get(url).status_code
    except httpx.TransportError:
        return 0


def test_a_frontend_whose_loop_keeps_failing_is_unhealthy(checkpoint: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url, odd, log = f"http://127.0.0.1:{port}", tmp_path / "odd", tmp_path / "log"
    command = ["--model-path", str(checkpoint), "--port", str(port), "--discovery-backend", "file"]
    with process(FRONTEND, str(odd), *command, log=log, DYN_FILE_KV=str(tmp_path / "discovery")):
        wait_until(lambda: status(f"{url}/live") == 200, said=log.read_text)
        assert httpx.get(f"{url}/health").json()["status"] == "not ready"
        odd.touch()
        wait_until(lambda: status(f"{url}/live") == 503, said=log.read_text)
        health, nim = httpx.get(f"{url}/health"), httpx.get(f"{url}/v1/health/ready")
        said = "not ready: the loop 'discovery of "
        assert health.status_code == 503 and health.json()["status"].startswith(said)
        assert nim.status_code == 503 and nim.json()["message"].startswith(said)
        assert health.json()["status"].endswith(" has failed 5 times in a row, last with RuntimeError")
        assert failures(url, "discovery") >= 5
        odd.unlink()
        wait_until(lambda: status(f"{url}/live") == 200, said=log.read_text)
        assert httpx.get(f"{url}/health").json()["status"] == "not ready"
    assert "RuntimeError: odd" in log.read_text() and "should be replaced" in log.read_text()


def test_a_worker_whose_loop_keeps_failing_is_unhealthy(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url, odd, log = f"http://127.0.0.1:{port}", tmp_path / "odd", tmp_path / "log"
    discovery = str(tmp_path / "discovery")
    with process(WORKER, str(odd), log=log, DYN_FILE_KV=discovery, DYN_SYSTEM_PORT=str(port)):
        wait_until(lambda: status(f"{url}/health") == 200, said=log.read_text)
        odd.touch()
        wait_until(lambda: status(f"{url}/health") == 503, said=log.read_text)
        assert status(f"{url}/live") == 503
        assert failures(url, "registration") >= 5
        odd.unlink()
        wait_until(lambda: status(f"{url}/health") == 200, said=log.read_text)
    assert "RuntimeError: odd" in log.read_text() and "should be replaced" in log.read_text()
