"""Discovery in etcd, requests over NATS or over TLS; their servers are stopped and started under load."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tessera.rpc import FORGOTTEN
from tests.e2e.faults.stores import Etcd, Nats
from tests.e2e.faults.test_processes import until
from tests.e2e.faults.traffic import PAUSE, Known, traffic
from tests.e2e.service import Service, launch
from tests.proc import open_files

pytestmark = pytest.mark.service

# As short as an outage of a second allows. Of what the runtime connects to etcd again, each waits for longer
# than the one before, and the lease may be the last: of ten seconds it ran out in half of the outages.
LEASE = 20


@contextmanager
def service(checkpoint: Path, folder: Path, **environment: str) -> Iterator[Service]:
    folder.mkdir(exist_ok=True)
    with launch("e_p.sh", checkpoint, folder / "log", workers=2, environment=environment) as running:
        yield running


async def answers_again(running: Service, known: list[Known], timeout: float = 90.0) -> None:
    """Every kind of input is answered rightly, by workers that are all there."""
    await asyncio.to_thread(running.wait_workers, 1, 1, timeout)
    async with traffic([running.url], known, concurrency=4, pause=PAUSE) as load:
        await asyncio.sleep(2.0)
    assert load.errors == [] and load.vectors > 0


async def test_nats_and_etcd_go_away_and_come_back(
    checkpoint: Path, known: list[Known], tmp_path: Path
) -> None:
    """An outage of etcd is not noticed while the leases last; after it every process is started again."""
    nats, etcd = Nats(tmp_path), Etcd(tmp_path)
    try:
        settings = {
            "DYN_REQUEST_PLANE": "nats",
            "NATS_SERVER": nats.url,
            "DYN_DISCOVERY_BACKEND": "etcd",
            "ETCD_ENDPOINTS": etcd.url,
            "ETCD_LEASE_TTL": str(LEASE),
        }
        with service(checkpoint, tmp_path / "service", **settings) as running:
            await answers_again(running, known)
            before = running.pids_in_order(3)
            nats.stop()
            await asyncio.sleep(5.0)
            nats.start()
            await back(running, known, "NATS gone for 5 s")
            async with traffic([running.url], known, concurrency=4, pause=PAUSE) as load:
                etcd.stop()
                await asyncio.to_thread(etcd.start)
                await asyncio.sleep(5.0)
            assert load.errors == []
            await asyncio.sleep(LEASE)
            assert running.pids_in_order(3) == before
            etcd.stop()
            stopped = time.monotonic()

            def lost() -> bool:
                health = httpx.get(f"{running.url}/health")
                return health.status_code == 503 and health.json()["workers"] == {"embed": 0, "encode": 0}

            await until(lost)
            # Of three leases the first was over after 14 s; one that etcd finds alive goes on.
            await asyncio.sleep(max(0.0, stopped + LEASE + 3 - time.monotonic()))
            assert running.pids_in_order(3) == before
            etcd.start()
            left = [f"(pid {pid}) ended with status {FORGOTTEN}" for pid in before]

            def ended() -> bool:
                return all(line in running.log.read_text() for line in left)

            await back(running, known, f"etcd gone for {time.monotonic() - stopped:.0f} s")
            await until(ended)
            await answers_again(running, known)
    finally:
        nats.stop()
        etcd.stop()


async def back(running: Service, known: list[Known], what: str) -> None:
    started = time.monotonic()
    await answers_again(running, known)
    # Two seconds of it are the traffic that proves it.
    print(f"{what}: whole again {time.monotonic() - started - 2.0:.1f} s after its return")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate authority of our own, and a server's and a client's certificate from it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    for authority in ("ca", "stranger"):
        openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={authority}"),
            *("-keyout", f"{authority}.key", "-out", f"{authority}.pem"),
        )
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl(
            *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "2", "-extfile", "names", "-out", f"{name}.pem"),
        )
    return folder


def tls(folder: Path, authority: str = "ca") -> dict[str, str]:
    return {
        "DYN_TCP_TLS_CERT_PATH": str(folder / "server.pem"),
        "DYN_TCP_TLS_KEY_PATH": str(folder / "server.key"),
        "DYN_TCP_TLS_CLIENT_CA_CERT_PATH": str(folder / "ca.pem"),
        "DYN_TCP_TLS_CA_CERT_PATH": str(folder / f"{authority}.pem"),
        "DYN_TCP_TLS_CLIENT_CERT_PATH": str(folder / "client.pem"),
        "DYN_TCP_TLS_CLIENT_KEY_PATH": str(folder / "client.key"),
        "DYN_TCP_TLS_SERVER_NAME": "localhost",
    }


async def test_requests_travel_over_tls(
    checkpoint: Path, known: list[Known], certificates: Path, tmp_path: Path
) -> None:
    with service(checkpoint, tmp_path / "service", **tls(certificates)) as running:
        await answers_again(running, known)
        ports = [connection for connection in listening(running) if connection]
        assert ports
        spoken = [speaks_tls(port) for port in ports]
        print("ports that speak TLS:", dict(zip(ports, spoken, strict=True)))
        assert any(spoken)


def listening(running: Service) -> list[int]:
    """Ports on which the workers listen, but for their metrics."""
    inodes = set()
    for pid in running.pids_in_order(3)[1:]:
        inodes |= {name[8:-1] for name in open_files(pid) if name.startswith("socket:[")}
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        port = int(fields[1].split(":")[1], 16)
        if fields[3] == "0A" and fields[9] in inodes and port not in running.worker_ports:
            found.append(port)
    return found


def speaks_tls(port: int) -> bool:
    done = subprocess.run(
        ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-brief"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=180,
    )
    return b"Protocol version: TLS" in done.stderr + done.stdout


async def test_a_worker_with_a_stranger_s_certificate_gets_no_work(
    checkpoint: Path, certificates: Path, tmp_path: Path
) -> None:
    settings = tls(certificates, authority="stranger") | {"TESSERA_READY_TIMEOUT_SECONDS": "10"}
    with pytest.raises(AssertionError, match="did not become ready"):  # noqa: SIM117
        with service(checkpoint, tmp_path / "service", **settings) as running:
            running.health()
