"""OpenMP's threads sleep where they wait; the library itself says how it was set up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.starts


@pytest.mark.parametrize(("asked", "found"), [(None, "PASSIVE"), ("active", "ACTIVE")])
def test_threads_of_a_worker_sleep_unless_told_otherwise(asked: str | None, found: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "true"} | ({"OMP_WAIT_POLICY": asked} if asked else {})
    worker = subprocess.run(
        [sys.executable, "-m", "tessera.worker", "--help"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"OMP_WAIT_POLICY = '{found}'" in worker.stderr
