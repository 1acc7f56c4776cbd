"""A real Prometheus beside a service that the launch scripts started."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from tests.e2e.service import ROOT, Service, free_ports
from tests.waiting import wait_until

FOLDER = ROOT / "deploy" / "prometheus"


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """The labels and the value of each series now."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expr}).json()
        assert answer["status"] == "success", (expr, answer)
        return [(row["metric"], float(row["value"][1])) for row in answer["data"]["result"]]

    def has_data(self, expr: str) -> bool:
        return any(math.isfinite(value) for _, value in self.query(expr))

    def names(self) -> set[str]:
        return set(httpx.get(f"{self.url}/api/v1/label/__name__/values").json()["data"])


@contextmanager
def prometheus(service: Service, folder: Path) -> Iterator[Prometheus]:
    """Scrapes every second by the repository's own configuration, with this service's ports in it."""
    executable = shutil.which("prometheus")
    assert executable is not None
    config = yaml.safe_load((FOLDER / "launch.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    ports = {"8000": service.url.rpartition(":")[2]}
    ports |= {str(8081 + index): str(port) for index, port in enumerate(service.worker_ports)}
    for job in config["scrape_configs"]:
        for static in job["static_configs"]:
            static["targets"] = [
                f"{host}:{ports[port]}" for host, _, port in (t.rpartition(":") for t in static["targets"])
            ]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(FOLDER / "rules.yaml", folder)
    (port,) = free_ports(1)
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                executable,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(
            lambda: _ready(f"http://127.0.0.1:{port}/-/ready"),
            process=process,
            said=(folder / "prometheus.log").read_text,
        )
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(timeout=60)


def _ready(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False
