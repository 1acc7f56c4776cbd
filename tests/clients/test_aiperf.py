"""aiperf against a running service.

It asks for an older huggingface_hub than this repository's own tests do, so it lives in an environment of
its own, which ``scripts/clients`` makes. ``AIPERF`` names another executable.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import ClosedService
from tests.clients.environment import clients_environment
from tests.e2e.service import MODEL

pytestmark = [pytest.mark.service, pytest.mark.installs, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def aiperf() -> str:
    return os.environ.get("AIPERF") or str(clients_environment("aiperf") / "bin" / "aiperf")


# One of the endpoints has it look at the service's metrics meanwhile, which is a process more.
IMAGES = (
    "--image-width-mean",
    "64",
    "--image-height-mean",
    "48",
    "--image-format",
    "png",
    "--no-server-metrics",
)
REQUESTS = 6


@pytest.mark.parametrize(
    ("endpoint", "flags"),
    [("embeddings", ()), ("nim_embeddings", IMAGES), ("chat_embeddings", IMAGES)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_request_succeeds(
    service: ClosedService,
    aiperf: str,
    checkpoint: Path,
    tmp_path: Path,
    endpoint: str,
    flags: tuple[str, ...],
) -> None:
    command = [aiperf, "profile", "--model", MODEL, "--url", service.url, "--endpoint-type", endpoint]
    command += ["--api-key", service.key, "--tokenizer", str(checkpoint), "--ui", "none"]
    command += ["--request-count", str(REQUESTS), "--concurrency", "2", "--synthetic-input-tokens-mean", "20"]
    # A process less, which would look for GPUs.
    command += ["--artifact-dir", str(tmp_path), "--no-gpu-telemetry", *flags]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert not report.get("error_summary")
