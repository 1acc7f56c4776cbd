"""schemathesis over the running service's own OpenAPI document."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import ClosedService

pytestmark = [pytest.mark.service, pytest.mark.fuzzes]

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_the_document_is_kept_and_nothing_is_a_server_error(service: ClosedService, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{service.url}/openapi.json"]
    command += ["-H", f"Authorization: Bearer {service.key}", "--checks", CHECKS, "--phases", "fuzzing"]
    command += ["--max-examples", "40", "--seed", "1", "--suppress-health-check", "all", "--no-color"]
    # The metrics are Prometheus' format, which no schema describes.
    command += ["--exclude-path", "/metrics", "--exclude-path", "/v1/metrics"]
    command += ["--continue-on-failure", "--generation-database", "none"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    generated = re.search(r"(\d+) generated", ran.stdout)
    assert generated is not None
    assert int(generated[1]) > 200, ran.stdout[-1500:]
