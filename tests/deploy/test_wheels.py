"""The wheels of the worker images. The last file of its folder: pip looks for them while the others run."""

from __future__ import annotations

import pytest

from tests.deploy.conftest import Resolution
from tests.deploy.dockerfile import Dockerfile

pytestmark = [pytest.mark.xdist_group("images"), pytest.mark.images, pytest.mark.timeout(600)]


def test_the_wheels_of_every_worker_can_be_found(dockerfile: Dockerfile, resolution: Resolution) -> None:
    said, complaints = resolution.process.communicate(timeout=600)
    assert resolution.process.returncode == 0, complaints
    listed = dict(line.split("==") for line in said.split())
    assert {
        "torch",
        "triton",
        "nixl",
        "nixl-cu13",
        "safetensors",
        "nvidia-cublas",
        "tensorrt-rtx-cu13-libs",
        "quack-kernels",
    } <= listed.keys()
    assert "nixl-cu12" not in listed
    # The image for CPUs asks for less.
    assert {"--extra", "worker"} <= set(dockerfile.bundle_words("cpu-wheels"))
    assert set(dockerfile.bundle_words("cpu-wheels")) - {"cpu"} <= set(resolution.words)
