"""The images' stages, carried out in bare folders; a frontend needs no more than a minute's downloads."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.deploy.dockerfile import PREFIX, Build, Stage
from tests.e2e.service import ROOT


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
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return Build(ROOT / "deploy/docker/Dockerfile", ROOT, tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def frontend_image(build: Build) -> Stage:
    """The whole ``frontend`` target: its wheels come from the package index, and it is installed without."""
    try:
        return build.stage("frontend")
    except RuntimeError as error:
        if any(sign in str(error) for sign in ("No matching distribution", "connection")):
            pytest.skip(f"the package index cannot be reached: {error}")
        raise


@pytest.fixture(scope="session")
def bundle(build: Build, frontend_image: Stage) -> Path:
    """What ``scripts/bundle`` made for this Python and a frontend."""
    return build.stage("frontend-environment").root / f"{PREFIX}/wheels".lstrip("/")


@pytest.fixture(scope="session")
def bare_frontend(frontend_image: Stage) -> Path:
    """The interpreter of an environment that holds what the bundle does and nothing else."""
    return frontend_image.root / f"{PREFIX}/venv/bin/python".lstrip("/")
