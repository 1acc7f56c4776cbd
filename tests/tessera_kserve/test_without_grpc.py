"""A frontend without grpcio and protobuf: ``/v2`` answers, and the port of gRPC is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.extras import lack
from tests.e2e.service import MODEL, free_ports
from tests.frontend.alone import frontend_process

pytestmark = [pytest.mark.service, pytest.mark.kserve]

# Read by Python before anything else.
_BLOCKED = """
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "grpc" or name.startswith("google.protobuf"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture
def without_grpc(tmp_path: Path) -> dict[str, str]:
    """The variables of a process that can import neither."""
    (tmp_path / "sitecustomize.py").write_text(_BLOCKED)
    return {"PYTHONPATH": str(tmp_path)}


def test_v2_over_http_needs_neither(checkpoint: Path, tmp_path: Path, without_grpc: dict[str, str]) -> None:
    with frontend_process(checkpoint, tmp_path, environment=without_grpc) as alone:
        http = alone.http
        assert http.get("/v2/health/live").json() == {"live": True}
        assert http.get("/v2").json()["name"] == "tessera"
        (output,) = http.get("/v2/models/router").json()["outputs"]
        assert output["name"] == "pooled"
        assert http.get("/v2/models/router/config").json()["max_batch_size"] == 256
        assert http.get(f"/v2/models/{MODEL}/stats").json()["model_stats"][0]["execution_count"] == 0
        tokens = {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [1, 5]}
        # Read, and sent to nobody: no worker is there.
        refused = http.post("/v2/models/router/infer", json={"inputs": [tokens]})
        assert refused.status_code == 503 and list(refused.json()) == ["error"]
        # An empty row needs no worker.
        mask = {"name": "attention_mask", "datatype": "INT64", "shape": [1, 2], "data": [0, 0]}
        answer = http.post("/v2/models/router/infer", json={"inputs": [tokens, mask]})
        assert answer.status_code == 200 and set(answer.json()["outputs"][0]["data"]) == {0.0}


def test_the_port_is_refused_in_a_line_that_says_what_to_install(
    checkpoint: Path, tmp_path: Path, without_grpc: dict[str, str]
) -> None:
    (port,) = free_ports(1)
    words = ["-m", "tessera.frontend", "--model-path", str(checkpoint), "--grpc-port", str(port)]
    ended = subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"DYN_FILE_KV": str(tmp_path)} | without_grpc,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.endswith(f"--grpc-port {lack('grpcio', 'protobuf', extra='kserve')}")
