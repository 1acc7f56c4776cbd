"""A bundle of wheels for a frontend, and the bare virtual environment that is installed from it alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.service import ROOT

PART_MB = 40


def run_script(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``scripts/bundle`` makes for this Python and a frontend, in parts."""
    out = tmp_path_factory.mktemp("offline") / "bundle"
    ran = run_script(
        *(sys.executable, ROOT / "scripts" / "bundle", "--out", out),
        *("--extra", "none", "--part-mb", str(PART_MB)),
    )
    if ran.returncode and any(sign in ran.stderr for sign in ("No matching distribution", "connection")):
        pytest.skip(f"the package index cannot be reached: {ran.stderr[-300:]}")
    assert ran.returncode == 0, ran.stderr
    return out


@pytest.fixture(scope="session")
def bare_frontend(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds what the bundle does and nothing else."""
    venv = tmp_path_factory.mktemp("bare") / "venv"
    ran = run_script(ROOT / "scripts" / "install-offline", bundle, venv, PYTHON=sys.executable)
    assert ran.returncode == 0, ran.stderr
    return venv / "bin" / "python"
