"""aiperf against a running service.

It asks for an older huggingface_hub than this repository's own tests do, so it lives in an environment of
its own: ``AIPERF`` names its executable, and without one these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import ClosedService
from tests.e2e.service import MODEL

AIPERF = os.environ.get("AIPERF") or shutil.which("aiperf")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(AIPERF is None, reason="AIPERF does not name aiperf's executable"),
]

IMAGES = ("--image-width-mean", "64", "--image-height-mean", "48", "--image-format", "png")
REQUESTS = 6


@pytest.mark.parametrize(
    ("endpoint", "flags"),
    [("embeddings", ()), ("nim_embeddings", IMAGES), ("chat_embeddings", IMAGES)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_request_succeeds(
    service: ClosedService, checkpoint: Path, tmp_path: Path, endpoint: str, flags: tuple[str, ...]
) -> None:
    command = [str(AIPERF), "profile", "--model", MODEL, "--url", service.url, "--endpoint-type", endpoint]
    command += ["--api-key", service.key, "--tokenizer", str(checkpoint), "--ui", "none"]
    command += ["--request-count", str(REQUESTS), "--concurrency", "2", "--synthetic-input-tokens-mean", "20"]
    command += ["--artifact-dir", str(tmp_path), *flags]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert not report.get("error_summary")
