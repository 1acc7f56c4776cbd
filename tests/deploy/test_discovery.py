"""Discovery by Kubernetes: the real runtime against a stand-in for its API, probed as a kubelet would."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deploy.processes import running, wait_for
from tests.e2e.service import MODEL, ROOT, free_ports

pytestmark = pytest.mark.e2e
NAMESPACE = "tessera"


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
    deadline = time.monotonic() + 60
    while httpx.get(url).status_code != status:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def test_a_pod_is_found_when_it_is_ready_and_gone_when_it_drains(checkpoint: Path, tmp_path: Path) -> None:
    api_port, system_port, http_port = free_ports(3)
    api_command = [sys.executable, "-m", "tests.deploy.kubernetes_api", str(api_port), NAMESPACE]
    api_command += [f"worker-0=http://127.0.0.1:{system_port}/health"]
    shared = os.environ | {
        "KUBECONFIG": str(kubeconfig(tmp_path / "kubeconfig", api_port)),
        "PYTHON": sys.executable,
        "MODEL_PATH": str(checkpoint),
        "SERVED_MODEL_NAME": MODEL,
        "HOST_ADDRESS": "127.0.0.1",
        "DYN_DISCOVERY_BACKEND": "kubernetes",
        "DYN_HTTP_HOST": "127.0.0.1",
        "DYN_HTTP_PORT": str(http_port),
        "DYN_SYSTEM_HOST": "127.0.0.1",
        "DYN_SYSTEM_PORT": str(system_port),
        "OMP_NUM_THREADS": "1",
        "POD_NAMESPACE": NAMESPACE,
    }
    start = ROOT / "deploy/start-role"
    logs = {name: tmp_path / name for name in ("api", "worker", "frontend")}
    worker_pod = shared | {"POD_NAME": "worker-0", "POD_UID": "uid-worker-0"}
    frontend_pod = shared | {"POD_NAME": "frontend-0", "POD_UID": "uid-frontend-0"}
    url = f"http://127.0.0.1:{http_port}"
    with running(api_command, dict(os.environ), logs["api"]) as api:
        wait_for(
            f"http://127.0.0.1:{api_port}/apis/discovery.k8s.io/v1/namespaces/tessera/endpointslices",
            api,
            logs["api"],
        )
        with (
            running([start, "agg"], worker_pod, logs["worker"]) as worker,
            running([start, "frontend"], frontend_pod, logs["frontend"]) as frontend,
        ):
            wait_for(f"{url}/live", frontend, logs["frontend"])
            assert httpx.get(f"{url}/health").status_code == 503
            wait_for(f"{url}/health", frontend, logs["frontend"])
            assert httpx.get(f"http://127.0.0.1:{system_port}/health").status_code == 200
            answer = httpx.post(f"{url}/v1/embeddings", json={"model": MODEL, "input": "here"}, timeout=60)
            assert answer.status_code == 200, answer.text
            os.kill(worker.pid, signal.SIGTERM)
            wait_status(f"{url}/health", 503, logs["frontend"])
            assert worker.wait(40) == 0, logs["worker"].read_text()
