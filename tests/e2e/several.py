"""Several models behind one frontend: a file that lists them, and a worker for each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tessera.model_names import namespace_of
from tests.e2e.service import free_ports
from tests.forks.popen import Forked
from tests.waiting import wait_until

NAMESPACE = "several"


@dataclass
class Several:
    """``workers`` are by the model's first name."""

    folder: Path
    url: str
    log: Path
    frontend: subprocess.Popen[bytes]
    stack: ExitStack
    environment: Mapping[str, str]
    rpc: Sequence[str]
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_worker(self, name: str, checkpoint: Path, *flags: str) -> subprocess.Popen[bytes]:
        process = self.stack.enter_context(
            _process(
                [
                    *("tessera.worker", "--disaggregation-mode", "agg", "--model-path", str(checkpoint)),
                    *("--served-model-name", name, "--namespace", namespace_of(NAMESPACE, name)),
                    *(*self.rpc, "--multimodal-embedding-cache-capacity-gb", "0.05"),
                    *flags,
                ],
                self.environment,
                self.folder / f"{len(self.workers)}.log",
            )
        )
        self.workers[name] = process
        return process

    def start_frontend(self, *flags: str) -> str:
        """The URL of one more for the same models, which may not answer yet."""
        (port,) = free_ports(1)
        command = ["tessera.frontend", "--models", str(self.folder / "models.json"), "--port", str(port)]
        command += ["--namespace", NAMESPACE, *self.rpc, *flags]
        self.stack.enter_context(_process(command, self.environment, self.folder / f"frontend-{port}.log"))
        return f"http://127.0.0.1:{port}"

    def serve(self, *models: dict[str, Any]) -> None:
        """List these from now on."""
        write_models(self.folder, *models)
        self.frontend.send_signal(signal.SIGHUP)

    def health(self, name: str) -> dict[str, Any]:
        """What is said of a model; empty where it is not served."""
        found: dict[str, Any] = httpx.get(f"{self.url}/health").json()["models"].get(name, {})
        return found

    def wait(self, name: str, *, status: str | None = "ready") -> None:
        """Until a model has this status; None: until it is not served."""
        wait_until(
            lambda: self.health(name).get("status") == status,
            process=self.frontend,
            said=lambda: (name, self.health(name), self.log.read_text()),
        )

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60)


def write_models(folder: Path, *models: dict[str, Any]) -> Path:
    """Where they are listed; whoever reads it finds the old list or the new one."""
    path, new = folder / "models.json", folder / "models.new"
    new.write_text(json.dumps({"models": list(models)}))
    new.replace(path)
    return path


@contextmanager
def several(
    folder: Path,
    models: Mapping[str, Path],
    *flags: str,
    rpc: Sequence[str] = ("--discovery-backend", "file"),
) -> Iterator[Several]:
    """A frontend for these checkpoints by their names, and an aggregated worker for each.

    ``flags`` are the frontend's, ``rpc`` are those of all.
    """
    (port,) = free_ports(1)
    environment = os.environ | {"DYN_FILE_KV": str(folder / "discovery"), "OMP_NUM_THREADS": "1"}
    listed = [listing(name, path, slot) for slot, (name, path) in enumerate(models.items())]
    command = ["tessera.frontend", "--models", str(write_models(folder, *listed)), "--port", str(port)]
    command += ["--namespace", NAMESPACE, *rpc, *flags]
    with ExitStack() as stack:
        log = folder / "frontend.log"
        frontend = stack.enter_context(_process(command, environment, log))
        found = Several(folder, f"http://127.0.0.1:{port}", log, frontend, stack, environment, rpc)
        for name, path in models.items():
            found.start_worker(name, path)
        wait_until(lambda: _answers(found.url), process=frontend, said=log.read_text)
        for name in models:
            found.wait(name)
        yield found


def listing(name: str, checkpoint: Path, slot: int, **others: Any) -> dict[str, Any]:
    """A model's entry in the file."""
    return {
        "model_path": str(checkpoint),
        "served_model_names": [name],
        "expected_embed": 1,
        "slot": slot,
        **others,
    }


@contextmanager
def _process(
    command: list[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = Forked([sys.executable, "-m", *command], env=environment, stderr=output)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/live").status_code == 200
    except httpx.TransportError:
        return False
