"""``tessera serve`` with a file that a test changes, and a client that asks it all the time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from benchmarks.proc import children

from tests.e2e.service import free_ports, lasting_members
from tests.forks.popen import Forked
from tests.proc import command_line
from tests.signals import default_signals
from tests.waiting import wait_until


class Serve:
    """``tessera serve`` with a file that a test changes."""

    def __init__(self, folder: Path, *models: dict[str, Any], **common: Any) -> None:
        self.folder, self.log = folder, folder / "log"
        self.file = folder / "serve.yaml"
        self.common = {
            "port": free_ports(1)[0],
            "system_port_base": free_ports(6)[0],
            "agg_workers": 1,
            **common,
        }
        self.url = f"http://127.0.0.1:{self.common['port']}"
        self.write(*models)

    def write(self, *models: dict[str, Any], **common: Any) -> None:
        self.file.write_text(yaml.safe_dump({**self.common, **common, "models": list(models)}))

    @contextmanager
    def running(self, environment: dict[str, str] | None = None) -> Iterator[Serve]:
        with self.log.open("wb") as output:
            self.process = Forked(
                [sys.executable, "-P", "-m", "tessera.cli", "serve", "--config", str(self.file)],
                env={**(environment or os.environ), "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=default_signals,
            )
        try:
            self.wait_for("tessera: ready at")
            yield self
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(timeout=90) == 143, self.log.read_text()
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        assert lasting_members(self.process.pid) == []

    def wait_for(self, line: str, count: int = 1) -> None:
        """Until the log has it so often."""
        self.wait(lambda: self.log.read_text().count(line) >= count)

    def wait(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, process=self.process, said=self.log.read_text)

    def reload(self, said: str) -> None:
        """Tell it to read its file again, and wait until it says so."""
        before = self.log.read_text().count(said)
        self.process.send_signal(signal.SIGHUP)
        self.wait_for(said, before + 1)

    def ask(self, model: str) -> httpx.Response:
        body = {"model": model, "input": "a yellow heart"}
        return httpx.post(f"{self.url}/v1/embeddings", json=body, timeout=60)

    def vector(self, model: str) -> list[float]:
        answer = self.ask(model)
        assert answer.status_code == 200, (answer.text, self.log.read_text())
        found: list[float] = answer.json()["data"][0]["embedding"]
        return found

    def models(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = httpx.get(f"{self.url}/health").json()["models"]
        return found

    def worker(self, namespace: str) -> list[int]:
        """The workers in a namespace."""
        found = []
        for pid in children(self.process.pid):
            words = command_line(pid)
            if "tessera.worker" in words and words[words.index("--namespace") + 1] == namespace:
                found.append(pid)
        return found


@contextmanager
def client(serve: Serve, model: str, *others: int) -> Iterator[list[int]]:
    """Asks one model all the time, one request after another; the statuses of its answers.

    They are 200, or ``others`` where it is taken away or replaced meanwhile.
    """
    statuses: list[int] = []
    done = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=60) as session:
            while not (statuses and done.is_set()):
                body = {"model": model, "input": f"text {len(statuses)}"}
                statuses.append(session.post(f"{serve.url}/v1/embeddings", json=body).status_code)
                # As long as an answer takes: without it client, frontend and worker keep a processor busy.
                time.sleep(0.01)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield statuses
    finally:
        done.set()
        thread.join()
    assert set(statuses) <= {200, *others}
