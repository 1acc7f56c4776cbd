"""The images: built from the Dockerfile, started without rights on a read-only root, asked, and ended."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.docker_host import DockerHost
from tests.e2e.service import MODEL, ROOT

pytestmark = [pytest.mark.xdist_group("containers"), pytest.mark.images, pytest.mark.timeout(1500)]
CONFINED = (
    "--read-only",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges:true",
    "--tmpfs=/tmp:mode=1777",
)
GIGABYTE = 1e9
README = (ROOT / "deploy/README.md").read_text()


def inputs(photos: dict[str, bytes]) -> list[object]:
    """A text and a picture."""
    url = "data:image/jpeg;base64," + base64.b64encode(photos["flower"]).decode()
    return ["a flower", [{"type": "image_url", "image_url": {"url": url}}]]


def runs_without_rights(host: DockerHost, container: str) -> None:
    pid = host.state(container)["Pid"]
    status = Path(f"/proc/{pid}/status").read_text()
    assert "Uid:\t10001\t10001\t10001\t10001" in status and "CapEff:\t0000000000000000" in status
    ran = host.docker("exec", container, "sh", "-c", "touch /opt/here 2>&1 || true")
    assert "Read-only file system" in ran


def ended(host: DockerHost, container: str) -> int:
    """The status with which a container ends on ``docker stop``, which sends SIGTERM."""
    host.docker("stop", "--time", "45", container)
    status: int = host.state(container)["ExitCode"]
    return status


@pytest.mark.parametrize("target", ["frontend", "worker-cpu"])
def test_an_image_is_as_large_as_is_said(docker_host: DockerHost, target: str) -> None:
    size = int(docker_host.docker("image", "inspect", "--format={{.Size}}", docker_host.image(target)))
    base = int(
        docker_host.docker("image", "inspect", "--format={{.Size}}", docker_host.arguments["PYTHON_IMAGE"])
    )
    ((count, said),) = re.findall(rf"^\| `{target}` \| (\d+) \|.* (\d+\.\d+) GB \|$", README, re.MULTILINE)
    assert abs((size - base) / GIGABYTE - float(said)) < 0.15 * float(said), (size, base)
    (below,) = re.findall(r"The base, which is not included, had (\d+) MB", README)
    assert abs(base / 1e6 - float(below)) < 0.15 * float(below), base
    words = ["run", "--rm", "--entrypoint=sh", docker_host.image(target), "-c"]
    listed = docker_host.docker(*words, "ls -d /opt/tessera/venv/lib/python3*/site-packages/*.dist-info")
    # Without Tessera itself.
    assert len(listed.split()) - 1 == int(count)


def test_the_layers_of_an_image_are_as_large_as_is_said(docker_host: DockerHost) -> None:
    """Tessera's own, which is the last one, and TensorRT's below it."""
    words = ["history", "--human=false", "--format={{.Size}}", docker_host.image("worker-tensorrt")]
    sizes = [int(size) for size in docker_host.docker(*words).split() if size != "0"]
    (own,) = re.findall(r"Tessera itself is the last layer, (\d+) MB", README)
    (rest,) = re.findall(r"of which (\d\.\d+) GB are its layer on `worker-cuda`", README)
    assert abs(sizes[0] / 1e6 - float(own)) < 0.15 * float(own), sizes
    assert abs(sizes[1] / GIGABYTE - float(rest)) < 0.15 * float(rest), sizes


@pytest.fixture(scope="module")
def hub(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a hub's files, with the checkpoint as what was downloaded of ``tessera/random``."""
    folder = tmp_path_factory.mktemp("hub")
    # The user of the image reads it.
    folder.chmod(0o755)
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = folder / "hub/models--tessera--random"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text(commit)
    shutil.copytree(checkpoint, model / "snapshots" / commit)
    return folder


def test_one_image_serves_a_model_by_its_name(
    docker_host: DockerHost, hub: Path, photos: dict[str, bytes]
) -> None:
    volume = ["--volume", f"{hub}:/hub:ro", "--env", "HF_HOME=/hub", "--env", "HF_HUB_OFFLINE=1"]
    image = docker_host.image("serve")
    words = ["run", "--detach", "--publish", "127.0.0.1:8000:8000", *CONFINED, *volume, image]
    container = docker_host.docker(*words, "serve", "tessera/random")
    docker_host.wait_until_healthy(container)
    runs_without_rights(docker_host, container)
    body = {"model": "tessera/random", "input": inputs(photos)}
    status, answer = docker_host.ask(8000, "/v1/embeddings", body)
    assert status == 200 and len(json.loads(answer)["data"]) == 2, answer
    # As a shell has it of a program that SIGTERM ended.
    assert ended(docker_host, container) == 143, docker_host.logs(container)
    assert "stopped" in docker_host.logs(container)
    docker_host.docker("rm", "--volumes", container)


@pytest.fixture(scope="module")
def backplane(docker_host: DockerHost) -> Iterator[str]:
    """A network with an etcd."""
    etcd = re.findall(r"image: (\S*etcd:\S+)", (ROOT / "deploy/compose.yaml").read_text())[0]
    docker_host.docker("network", "create", "--internal", "plane")
    words = ["--listen-client-urls=http://0.0.0.0:2379", "--advertise-client-urls=http://etcd:2379"]
    container = docker_host.docker(
        *("run", "--detach", "--network=plane", "--network-alias=etcd", "--tmpfs=/data", etcd),
        *("/usr/local/bin/etcd", "--data-dir=/data", *words),
    )
    yield "plane"
    docker_host.docker("rm", "--force", "--volumes", container)
    docker_host.docker("network", "rm", "plane")


# What the index has for this Python may be torch for CPUs. That worker-cuda runs is in test_compose.py.
def test_a_worker_image_for_gpus_runs_without_one(
    docker_host: DockerHost, backplane: str, checkpoint: Path
) -> None:
    image = docker_host.image("worker-tensorrt")
    model = ["--env=TESSERA_MODEL_PATH=/model", f"--env=TESSERA_SERVED_MODEL_NAME={MODEL}"]
    model += ["--volume", f"{checkpoint}:/model:ro", "--env=ETCD_ENDPOINTS=http://etcd:2379"]
    container = docker_host.docker("run", "--detach", f"--network={backplane}", *CONFINED, *model, image)
    docker_host.wait_until_healthy(container)
    runs_without_rights(docker_host, container)
    code = "from tessera_engines.tensorrt.module import load_tensorrt as load; load('tensorrt_rtx')"
    docker_host.docker("exec", container, "python", "-c", code)
    # Triton compiles its launchers with it.
    docker_host.docker("exec", container, "gcc", "--version")
    assert ended(docker_host, container) == 0, docker_host.logs(container)
    docker_host.docker("rm", "--volumes", container)


def test_images_share_the_layers_that_are_the_same(docker_host: DockerHost) -> None:
    """All have a frontend's packages; torch is one layer too where one index has it for CPUs and for CUDA."""

    def below_tessera(target: str) -> list[str]:
        words = ["image", "inspect", "--format={{json .RootFS.Layers}}", docker_host.image(target)]
        layers: list[str] = json.loads(docker_host.docker(*words))
        return layers[:-1]

    frontend, cpu, cuda = map(below_tessera, ("frontend", "worker-cpu", "worker-cuda"))
    assert cpu[: len(frontend)] == cuda[: len(frontend)] == frontend
    if "TORCH_INDEX" in docker_host.arguments:
        assert len(cpu) == len(frontend) + 1 and cuda[: len(cpu)] == cpu


@pytest.mark.parametrize("target", ["frontend", "serve", "worker-tensorrt"])
def test_a_container_begins_with_an_empty_volume_of_its_own(docker_host: DockerHost, target: str) -> None:
    """What an image has in the place of a volume would be copied into each, and be root's."""
    words = ["run", "--rm", "--entrypoint=sh", docker_host.image(target), "-c"]
    assert docker_host.docker(*words, "find ~ -mindepth 1 && mkdir -p ~/.cache/kernels") == ""


def test_no_secret_of_the_build_is_in_an_image(docker_host: DockerHost) -> None:
    words = ["run", "--rm", "--entrypoint=sh", docker_host.image("frontend"), "-c"]
    assert docker_host.docker(*words, "cat /etc/pip.conf /run/secrets/* 2>/dev/null || true") == ""
    assert "index-url" not in docker_host.docker("history", "--no-trunc", docker_host.image("frontend"))
