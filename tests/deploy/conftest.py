"""A Docker daemon, and what the images are made of."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from tests.deploy.docker_host import DockerHost
from tests.deploy.docker_host import docker_host as started
from tests.deploy.dockerfile import Dockerfile
from tests.deploy.processes import run_script
from tests.e2e.service import ROOT
from tests.groups import group_fixture


@pytest.fixture(scope="session")
def dockerfile() -> Dockerfile:
    return Dockerfile(ROOT / "deploy/docker/Dockerfile")


@group_fixture
def docker_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerHost]:
    with started(tmp_path_factory.mktemp("docker")) as host:
        yield host


@pytest.fixture(scope="session")
def other_bundle(dockerfile: Dockerfile, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Popen[str]]:
    """``scripts/bundle`` at work on what the largest image has, for its Python, without downloading it.

    It is started before anything else because it mostly waits for the index.
    """
    command = [sys.executable, str(ROOT / "scripts/bundle"), "--dry-run", "--python", dockerfile.python]
    command += ["--accelerator", "cu13", "--glibc", "2.36", "--out", str(tmp_path_factory.mktemp("other"))]
    command += [f"--extra={extra}" for extra in dockerfile.extras("worker-tensorrt")]
    process = Popen(command, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    process.communicate()


@pytest.fixture(scope="session")
def resolved(dockerfile: Dockerfile) -> Iterator[dict[tuple[str, str], Future[dict[str, str]]]]:
    """The packages of images, by target and machine. uv waits for the index, while others run."""
    pool = ThreadPoolExecutor(1, "uv")
    yield {
        (target, machine): pool.submit(packages, dockerfile, target, machine)
        for target in ("frontend", "worker-cuda", "worker-tensorrt")
        for machine in ("x86_64", "aarch64")
    }
    pool.shutdown(cancel_futures=True)


def packages(dockerfile: Dockerfile, target: str, machine: str) -> dict[str, str]:
    """The versions, by name, of what ``deploy/docker/install`` puts into an image on Debian 12."""
    words = ["pip", "compile", ROOT / "pyproject.toml", "--quiet", "--no-header", "--no-annotate"]
    words += [f"--extra={extra}" for extra in dockerfile.extras(target)]
    words += ["--constraint", ROOT / "constraints.txt", "--overrides", ROOT / "deploy/docker/overrides.txt"]
    words += ["--python-version", dockerfile.python, "--python-platform", f"{machine}-manylinux_2_36"]
    ran = run_script(sys.executable, ROOT / "scripts/uv", *words, "--only-binary=:all:")
    assert ran.returncode == 0, ran.stderr
    return dict(line.split("==") for line in ran.stdout.split())


@pytest.fixture(scope="session")
def bundle(
    dockerfile: Dockerfile,
    other_bundle: Popen[str],
    resolved: object,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """What ``scripts/bundle`` makes for this Python and a frontend, from the package index."""
    folder = tmp_path_factory.mktemp("bundle")
    words = [f"--extra={extra}" for extra in dockerfile.extras("frontend")]
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
