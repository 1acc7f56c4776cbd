"""A Docker daemon, and what the images are made of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.docker_host import DockerHost
from tests.deploy.docker_host import docker_host as started
from tests.deploy.dockerfile import Dockerfile
from tests.deploy.processes import run_script
from tests.e2e.service import ROOT

LARGEST = ("tensorrt-wheels", "cuda-wheels")


@pytest.fixture(scope="session")
def dockerfile() -> Dockerfile:
    return Dockerfile(ROOT / "deploy/docker/Dockerfile")


@pytest.fixture(scope="session")
def docker_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerHost]:
    with started(tmp_path_factory.mktemp("docker")) as host:
        yield host


@dataclass(frozen=True, slots=True)
class Resolution:
    """pip at work on finding the wheels of images, for the images' Python, without downloading any."""

    words: list[str]
    process: subprocess.Popen[str]


@pytest.fixture(scope="session")
def resolution(dockerfile: Dockerfile, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resolution]:
    """The largest images', started before anything else because it mostly waits for the index."""
    minor = dockerfile.arguments["PYTHON_IMAGE"].split(":")[1].rsplit(".", 1)[0]
    words = [word for stage in LARGEST for word in dockerfile.bundle_words(stage)]
    words += ["--out", str(tmp_path_factory.mktemp("resolution"))]
    command = [sys.executable, str(ROOT / "scripts/bundle"), *words, "--python", minor, "--dry-run"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    yield Resolution(words, process)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    process.communicate()


@pytest.fixture(scope="session")
def bundle(dockerfile: Dockerfile, resolution: Resolution, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``scripts/bundle`` makes for this Python and a frontend, from the package index."""
    folder = tmp_path_factory.mktemp("bundle")
    words = dockerfile.bundle_words("frontend-wheels")
    ran = run_script(sys.executable, ROOT / "scripts/bundle", *words, "--out", folder)
    if any(sign in ran.stderr for sign in ("No matching distribution", "connection")):
        pytest.skip(f"the package index cannot be reached: {ran.stderr}")
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.fixture(scope="session")
def bare_frontend(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds what the bundle does and nothing else."""
    folder = tmp_path_factory.mktemp("frontend") / "venv"
    ran = run_script(ROOT / "scripts/install-offline", bundle, folder, PYTHON=sys.executable)
    assert ran.returncode == 0, ran.stderr
    return folder / "bin/python"
