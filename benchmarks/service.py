"""A Tessera service of plain processes on this machine, for as long as a benchmark runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.ports import free_ports
from tessera.launch.port import Port
from tessera.launch.ready import workers

_ROOT = Path(__file__).parent.parent

NAME: Final = "benchmark"
"""Of the model in requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """``mode`` is agg or e_p; ``engine`` is merged over the engine configuration as JSON.

    ``tree`` is the working tree whose package runs, with the stand-ins of its own benchmarks. Frontends that
    are not ``together`` have no seats of a group: each has a port of its own, and counts in memory of its
    own. The command of a module is added to what ``before`` has for it, which becomes it.
    """

    model_path: Path
    mode: str = "agg"
    frontends: int = 1
    engine: dict[str, object]
    worker_flags: tuple[str, ...] = ()
    frontend_flags: tuple[str, ...] = ("--max-in-flight", "100000")
    tree: Path = _ROOT
    together: bool = True
    before: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@contextmanager
def service(deployment: Deployment, logs: Path, *, timeout: float = 180) -> Iterator[tuple[str, ...]]:
    """The frontends' URLs once every process serves: one for all where they are together, else each one's."""
    logs.mkdir(parents=True, exist_ok=True)
    modes = {"agg": ["agg"], "e_p": ["encode", "embed"]}[deployment.mode]
    # Workers answer /metrics on the first ones.
    found = free_ports(len(modes) + deployment.frontends)
    ports = found[len(modes) :][: 1 if deployment.together else None]
    urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
    model = ["--model-path", str(deployment.model_path), "--served-model-name", NAME]
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as store, ExitStack() as stack:
        environment = os.environ | {"DYN_FILE_KV": store}
        if deployment.tree != _ROOT:
            paths = (deployment.tree, deployment.tree / "components/src", os.environ.get("PYTHONPATH", ""))
            # Without the folder where this runs, which would come first.
            environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONSAFEPATH": "1"}
        try:
            start = partial(_start, deployment.before)
            for mode, port in zip(modes, found, strict=False):
                flags = [*model, "--disaggregation-mode", mode, *deployment.worker_flags]
                flags += ["--override-engine-args", json.dumps(deployment.engine)]
                own = environment | {"DYN_SYSTEM_PORT": str(port)}
                processes.append(start("tessera.worker", flags, own, logs / f"{mode}.log"))
            shared_port: Port | None = None
            if deployment.together:
                counts = Path(store, "metrics")
                counts.mkdir()
                shared_port = Port.open("127.0.0.1", ports[0], deployment.frontends, metrics=counts)
                stack.callback(shared_port.close)
            for number in range(deployment.frontends):
                flags = [*model, "--port", str(ports[number % len(ports)]), *deployment.frontend_flags]
                inherited = shared_port.descriptors if shared_port else []
                own = environment | (shared_port.seat(number, inherited) if shared_port else {})
                log = logs / f"frontend-{number}.log"
                processes.append(start("tessera.frontend", flags, own, log, inherited))
            there = {"embed": 1, "encode": int(deployment.mode == "e_p")}
            there["frontends"] = deployment.frontends if deployment.together else 1
            _wait(urls, processes, there, timeout=timeout)
            yield urls
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _start(
    before: Mapping[str, Sequence[str]],
    module: str,
    flags: Sequence[str],
    environment: dict[str, str],
    log: Path,
    inherited: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [*before.get(module, ()), sys.executable, "-m", module, *flags],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=inherited,
        )


def _wait(
    urls: Sequence[str],
    processes: Sequence[subprocess.Popen[bytes]],
    there: Mapping[str, int],
    *,
    timeout: float,
) -> None:
    deadline = time.monotonic() + timeout
    for url in urls:
        while not (found := workers(url)) or any(found[name] < count for name, count in there.items()):
            for process in processes:
                if process.poll() is not None:
                    raise RuntimeError(f"{process.args!r} ended with {process.returncode}; see its log")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} was not ready after {timeout:.0f} s")
            time.sleep(0.1)
