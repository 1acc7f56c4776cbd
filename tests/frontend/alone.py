"""A frontend without workers, as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests import proc
from tests.e2e.service import MODEL, free_ports
from tests.forks.popen import Forked
from tests.frontend.watched import note
from tests.waiting import wait_until

MOST_TURN_MS = 100.0
"""Of ``Alone.longest_turn_ms``, whatever comes within the limits."""


@dataclass(frozen=True, slots=True)
class Alone:
    """A running frontend: its client, its process and the file that it logs to."""

    http: httpx.Client
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def peak_bytes(self) -> int:
        """The most memory that it has had at a time."""
        return proc.peak_bytes(self.process.pid)

    def forget_peak(self) -> int:
        """Begin to count ``peak_bytes`` anew, and give what it is now."""
        return proc.forget_peak(self.process.pid)

    @property
    def in_flight(self) -> int:
        """The requests that have a place; asking for it takes none, and no key where it is open."""
        metrics = self.http.get("/metrics").raise_for_status().text
        (value,) = re.findall(r"^tessera_requests_in_flight (\S+)$", metrics, re.MULTILINE)
        return int(float(value))

    @property
    def longest_turn_ms(self) -> float:
        """The longest that its event loop has stood in a turn since it began to be watched.

        Also for another thread that kept the interpreter; not for other processes.
        """
        return float(_turns(self.log.parent).read_text())

    def tries(self) -> Iterator[None]:
        """Ask again, at most three times, until no turn is long meanwhile.

        What the code takes it takes each time; where others use the cores a turn is longer now and then.
        """
        stood = []
        for _ in range(3):
            note(_turns(self.log.parent), 0.0)
            yield
            if (longest := self.longest_turn_ms) < MOST_TURN_MS:
                return
            stood.append(longest)
        raise AssertionError(f"the event loop stood for {stood} ms")


def _turns(folder: Path) -> Path:
    return folder / "longest-turn"


@contextmanager
def frontend(
    checkpoint: Path, folder: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[httpx.Client]:
    with frontend_process(checkpoint, folder, *flags, environment=environment) as alone:
        yield alone.http


@contextmanager
def frontend_process(
    checkpoint: Path,
    folder: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    watched: bool = False,
) -> Iterator[Alone]:
    """Run one that logs to a file in ``folder``, by TLS where ``flags`` say so."""
    (port,) = free_ports(1)
    url = f"{'https' if '--tls-cert' in flags else 'http'}://127.0.0.1:{port}"
    module = ("tests.frontend.watched", str(_turns(folder))) if watched else ("tessera.frontend",)
    command = [sys.executable, "-m", *module, "--model-path", str(checkpoint)]
    command += ["--served-model-name", MODEL, "--port", str(port), "--discovery-backend", "file"]
    command += ["--worker-wait-seconds", "0", *flags]
    settings = os.environ | {"DYN_FILE_KV": str(folder / "discovery")} | dict(environment or {})
    log = folder / "frontend.log"
    with log.open("wb") as errors:
        process = Forked(command, env=settings, stderr=errors)
    try:
        with httpx.Client(base_url=url, timeout=60, verify=False) as client:
            wait_until(lambda: _answers(client), process=process, said=log.read_text)
            yield Alone(client, process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/live").status_code == 200
    except httpx.TransportError:
        return False
