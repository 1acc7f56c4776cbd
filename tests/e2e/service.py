"""A service started by its launch script, as a user would start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from benchmarks.ports import free_ports
from benchmarks.proc import children
from prometheus_client.parser import text_string_to_metric_families

from tessera.frontend.group import GROUP_VARIABLE
from tests.forks.popen import Forked
from tests.proc import command_line, environment
from tests.signals import default_signals
from tests.waiting import wait_for_line, wait_until

ROOT = Path(__file__).parents[2]
MODEL = "tessera-random"


@dataclass(frozen=True, slots=True)
class Service:
    """``worker_ports`` are in the order in which the script starts workers: encode first, then embed.

    All frontends answer at ``url``, each of several at one of ``frontend_urls``, too.
    """

    url: str
    worker_ports: tuple[int, ...]
    script: subprocess.Popen[bytes]
    log: Path
    frontend_urls: tuple[str, ...] = ()

    def health(self) -> dict[str, object]:
        return httpx.get(f"{self.url}/health").json()

    def frontend_metric(self, name: str, **labels: str) -> float:
        return _metric(f"{self.url}/metrics", name, labels)

    def worker_metric(self, worker: int, name: str, **labels: str) -> float:
        """The sum of the samples of that name whose labels include these."""
        return _metric(f"http://127.0.0.1:{self.worker_ports[worker]}/metrics", name, labels)

    def pids(self) -> list[int]:
        """The processes of the service in the order in which the script started them: frontends, workers."""
        return [pid for pid in children(self.script.pid) if _is_tessera(pid)]

    def pids_in_order(self, count: int) -> list[int]:
        """The ``count`` processes of the service by their places, -1 for one that is not there now.

        A child that was started again has a later place in ``pids``.
        """
        first_port = self.worker_ports[0]
        frontends = count - len(self.worker_ports)
        found = [-1] * count
        for pid in self.pids():
            variables, arguments = environment(pid), command_line(pid)
            if "tessera.worker" in arguments and "DYN_SYSTEM_PORT" in variables:
                found[frontends + int(variables["DYN_SYSTEM_PORT"]) - first_port] = pid
            elif "tessera.frontend" in arguments and GROUP_VARIABLE in variables:
                found[json.loads(variables[GROUP_VARIABLE])["index"]] = pid
        return found

    def wait_workers(self, embed: int, encode: int, timeout: float = 90.0) -> None:
        """Wait until ``/health`` counts these workers, of a frontend that may not be there yet either."""
        wait_until(
            lambda: self.health()["workers"] == {"embed": embed, "encode": encode},
            timeout,
            despite=httpx.TransportError,
            said=self.log.read_text,
        )


def post(service: Service, route: str = "/v1/embeddings", **body: Any) -> httpx.Response:
    """Ask the service's model over HTTP."""
    return httpx.post(f"{service.url}{route}", json={"model": MODEL, **body}, timeout=60)


def _is_tessera(pid: int) -> bool:
    """The script has pauses for children, too."""
    return not {"tessera.frontend", "tessera.worker"}.isdisjoint(command_line(pid))


def _metric(url: str, name: str, labels: dict[str, str]) -> float:
    # Of a thousand lines, 20 ms to parse for a test that asks until something has come about.
    lines = [line for line in httpx.get(url).text.splitlines() if line.startswith(name)]
    return sum(
        sample.value
        for family in text_string_to_metric_families("\n".join(lines))
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@contextmanager
def launch(
    script: str,
    checkpoint: Path,
    log: Path,
    *,
    workers: int,
    frontends: int = 1,
    arguments: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[Service]:
    """Run ``launch/<script>``, wait for its ready line, and end it with Ctrl-C; nothing may be left.

    Without ``frontends`` ``url`` answers to nobody.
    """
    port, *others = free_ports(1 + (frontends if frontends > 1 else 0) + workers)
    own, worker_ports = others[: len(others) - workers], others[len(others) - workers :]
    settings = {
        "TESSERA_MODEL_PATH": str(checkpoint),
        "TESSERA_SERVED_MODEL_NAME": MODEL,
        "TESSERA_FRONTENDS": str(frontends),
        "TESSERA_PORT": str(port),
        "TESSERA_FRONTEND_PORT_BASE": str(own[0] if own else 0),
        "TESSERA_SYSTEM_PORT_BASE": str(worker_ports[0] if worker_ports else 1),
        "TESSERA_READY_TIMEOUT_SECONDS": "240",
        # Two cores serve up to five processes here.
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        process = Forked(
            [str(ROOT / "launch" / script), *arguments],
            env=os.environ | settings | (environment or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=default_signals,
        )
    urls = tuple(f"http://127.0.0.1:{one}" for one in own)
    service = Service(f"http://127.0.0.1:{port}", tuple(worker_ports), process, log, urls)
    try:
        wait_for_line(log, "tessera: ready at" if frontends else "tessera: ready:", 270, process=process)
        yield service
    finally:
        # A terminal sends Ctrl-C to the whole foreground group.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            left = lasting_members(process.pid)
            assert not left, (left, log.read_text())


def group_pids(group: int) -> dict[int, str]:
    """The processes that are still in a process group, with their command lines.

    The first thread of a killed process is a zombie (Z) while others of its threads still run and
    keep its sockets; it is over when that thread alone is left (the 20th field counts them).
    """
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            over = fields[0] == "Z" and int(fields[17]) <= 1
            if int(fields[2]) == group and not over:
                command = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(stat.parent.name)] = command
        except (OSError, IndexError):
            continue
    return found


def lasting_members(group: int) -> list[str]:
    """What stays of a process group; a process that was killed takes a moment to die."""
    deadline = time.monotonic() + 60
    while (left := group_members(group)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def group_members(group: int) -> list[str]:
    """Command lines of the processes that are still in a process group."""
    return list(group_pids(group).values())
