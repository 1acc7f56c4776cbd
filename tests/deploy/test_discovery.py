"""Discovery by Kubernetes: the real runtime against a stand-in for its API, probed as a kubelet would."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deploy.processes import running, wait_for
from tests.e2e.service import MODEL, ROOT, free_ports
from tests.waiting import wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(900)]
NAMESPACE = "tessera"
START = ROOT / "deploy/start-role"


def kubeconfig(path: Path, port: int) -> Path:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "one", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "one", "user": {}}],
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one", "namespace": NAMESPACE}}],
        "current-context": "one",
    }
    path.write_text(yaml.safe_dump(content))
    return path


def wait_status(url: str, status: int, log: Path) -> None:
    wait_until(lambda: httpx.get(url).status_code == status, said=log.read_text)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the stand-in answers, and what its one worker pod and one frontend pod are started with."""

    worker: dict[str, str]
    frontend: dict[str, str]
    url: str
    system_url: str


@contextmanager
def cluster(checkpoint: Path, folder: Path, *pods: str) -> Iterator[Cluster]:
    """A stand-in for the API that knows these pods, each with the worker's probe."""
    api_port, system_port, http_port = free_ports(3)
    system_url = f"http://127.0.0.1:{system_port}"
    command = [sys.executable, "-m", "tests.deploy.kubernetes_api", str(api_port), NAMESPACE]
    command += [f"{pod}={system_url}/health" for pod in pods]
    shared = os.environ | {
        "KUBECONFIG": str(kubeconfig(folder / "kubeconfig", api_port)),
        "PYTHON": sys.executable,
        "TESSERA_MODEL_PATH": str(checkpoint),
        "TESSERA_SERVED_MODEL_NAME": MODEL,
        "TESSERA_HOST_ADDRESS": "127.0.0.1",
        "DYN_DISCOVERY_BACKEND": "kubernetes",
        "TESSERA_HOST": "127.0.0.1",
        "TESSERA_PORT": str(http_port),
        "DYN_SYSTEM_HOST": "127.0.0.1",
        "DYN_SYSTEM_PORT": str(system_port),
        "OMP_NUM_THREADS": "1",
        "POD_NAMESPACE": NAMESPACE,
    }
    log = folder / "api"
    with running(command, dict(os.environ), log) as api:
        slices = f"http://127.0.0.1:{api_port}/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
        wait_for(slices, api, log)
        yield Cluster(
            shared | {"POD_NAME": "worker-0", "POD_UID": "uid-worker-0"},
            shared | {"POD_NAME": "frontend-0", "POD_UID": "uid-frontend-0"},
            f"http://127.0.0.1:{http_port}",
            system_url,
        )


def test_a_pod_is_found_when_it_is_ready_and_gone_when_it_drains(checkpoint: Path, tmp_path: Path) -> None:
    worker_log, frontend_log = tmp_path / "worker", tmp_path / "frontend"
    with (
        cluster(checkpoint, tmp_path, "worker-0") as pods,
        running([START, "agg"], pods.worker, worker_log) as worker,
        running([START, "frontend"], pods.frontend, frontend_log) as frontend,
    ):
        wait_for(f"{pods.url}/live", frontend, frontend_log)
        wait_for(f"{pods.url}/health", frontend, frontend_log)
        assert httpx.get(f"{pods.system_url}/health").status_code == 200
        answer = httpx.post(f"{pods.url}/v1/embeddings", json={"model": MODEL, "input": "here"}, timeout=60)
        assert answer.status_code == 200, answer.text
        os.kill(worker.pid, signal.SIGTERM)
        wait_status(f"{pods.url}/health", 503, frontend_log)
        assert worker.wait(60) == 0, worker_log.read_text()


def test_a_pod_that_is_never_listed_ends_when_it_is_told_to(checkpoint: Path, tmp_path: Path) -> None:
    log = tmp_path / "worker"
    with cluster(checkpoint, tmp_path) as pods, running([START, "agg"], pods.worker, log) as worker:
        wait_for(f"{pods.system_url}/health", worker, log)
        assert "ready after" not in log.read_text()
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.wait(60) == 0, log.read_text()
