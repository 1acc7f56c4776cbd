"""The images' stages, carried out in bare folders; a frontend needs no more than a minute's downloads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.dockerfile import PREFIX, Build, Stage
from tests.e2e.service import ROOT

LARGEST = ("tensorrt-environment", "cuda-environment")


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


@dataclass(frozen=True, slots=True)
class Resolution:
    """pip at work on finding the wheels of images, for the images' Python, without downloading any."""

    words: list[str]
    process: subprocess.Popen[str]


@pytest.fixture(scope="session")
def resolution(build: Build) -> Iterator[Resolution]:
    """The largest images', started before anything else because it mostly waits for the index."""
    minor = build.arguments["PYTHON_IMAGE"].split(":")[1].rsplit(".", 1)[0]
    words = [word for stage in LARGEST for word in build.bundle_words(stage)]
    command = [sys.executable, str(ROOT / "scripts/bundle"), *words, "--python", minor, "--dry-run"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    yield Resolution(words, process)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    process.communicate()


@pytest.fixture(scope="session")
def frontend_image(build: Build, resolution: Resolution) -> Stage:
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
