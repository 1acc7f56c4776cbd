"""The wheels of the images. The last file of its folder: pip and uv look for them while the others run."""

from __future__ import annotations

import platform
import re
from concurrent.futures import Future
from subprocess import Popen

import pytest

from tests.deploy.dockerfile import Dockerfile
from tests.e2e.service import ROOT

README = (ROOT / "deploy/README.md").read_text()
Resolved = dict[tuple[str, str], Future[dict[str, str]]]

pytestmark = [pytest.mark.xdist_group("images"), pytest.mark.images, pytest.mark.timeout(600)]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("target", ["frontend", "worker-cuda", "worker-tensorrt"])
def test_the_packages_of_an_image_have_wheels(resolved: Resolved, target: str, machine: str) -> None:
    found = resolved[target, machine].result().keys()
    worker = {"torch", "triton", "nixl", "nixl-cu13", "safetensors", "nvidia-cublas", "quack-kernels"}
    assert {"ai-dynamo-runtime", "grpcio", "opentelemetry-sdk"} <= found
    assert found & worker == (worker if target != "frontend" else set())
    assert ("tensorrt-rtx-cu13-libs" in found) == (target == "worker-tensorrt")
    assert not {"nixl-cu12", "nvidia-cutlass-dsl-libs-cu12"} & found
    (said,) = re.findall(rf"^\| `{target}` \| (\d+) \|", README, re.MULTILINE)
    assert machine != "x86_64" or len(found) == int(said)


def test_an_image_for_cpus_has_the_packages_of_one_for_gpus(dockerfile: Dockerfile) -> None:
    """But for those of GPUs, so that the wheels of both are found."""
    assert set(dockerfile.extras("worker-cpu")) == set(dockerfile.extras("worker-cuda")) - {"cuda"}


def test_a_bundle_for_gpus_has_the_packages_of_the_image(
    resolved: Resolved, other_bundle: Popen[str]
) -> None:
    """pip finds for it what uv finds for the image, and both leave out the libraries of CUDA 12."""
    said, complaints = other_bundle.communicate(timeout=600)
    assert other_bundle.returncode == 0, complaints
    listed = dict(line.split("==") for line in said.split())
    assert listed.pop("tessera-embed")
    assert listed == resolved["worker-tensorrt", platform.machine()].result()
