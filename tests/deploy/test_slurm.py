"""The Slurm script, submitted to a real cluster whose nodes are network namespaces, with a real etcd."""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deploy.processes import run_script
from tests.deploy.slurm_cluster import Cluster, Job, slurm_cluster
from tests.e2e.service import MODEL, ROOT
from tests.proc import command_line

pytestmark = [
    pytest.mark.service,
    pytest.mark.operates,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.timeout(600),
]
SCRIPT = ROOT / "deploy/slurm/tessera.sbatch"
READY_SECONDS = 180
MODULES = ("tessera.frontend", "tessera.worker")


@pytest.mark.parametrize("path", [SCRIPT, SCRIPT.with_name("task"), ROOT / "deploy/start-role"])
def test_the_scripts_are_sound(path: Path) -> None:
    assert run_script("bash", "-n", path).returncode == 0
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    ran = run_script(shellcheck, path)
    assert ran.returncode == 0, ran.stdout


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed (Debian package etcd-server)")
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def job_settings(tmp_path: Path) -> dict[str, str]:
    """Variables of a job whose temporary files are in a folder of its own, ``scratch``."""
    (tmp_path / "scratch").mkdir()
    return {
        "VENV": str(Path(sys.executable).parents[1]),
        "TESSERA_READY_TIMEOUT_SECONDS": "120",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path / "scratch"),
    }


def left_of(cluster: Cluster, job: Job, scratch: Path) -> list[object]:
    """Processes and files of a job that has ended."""
    return [cluster.tasks(module) for module in MODULES if cluster.tasks(module)] + list(scratch.iterdir())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"TESSERA_MODEL_PATH": "/"},
            "ENCODE_NODES=1 must leave at least one of the job's 1 nodes to embed workers",
        ),
        (
            {"TESSERA_MODELS_FILE": "/", "MODELS": "a:text:1"},
            "MODELS: 'a:text:1' is not NAME:ROLE:NODES",
        ),
        (
            {"TESSERA_MODELS_FILE": "/", "MODELS": "a:agg:2 b:embed:2"},
            "MODELS asks for 4 nodes, and the job has 1",
        ),
        (
            {"TESSERA_MODELS_FILE": "/", "MODELS": ""},
            "MODELS: says which nodes have workers of which model",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_named(
    cluster: Cluster, tmp_path: Path, settings: dict[str, str], said: str
) -> None:
    job = cluster.submit(SCRIPT, tmp_path / "log", "--nodes=1", **settings)
    assert job.wait_for_end(30) == "FAILED"
    assert said in job.written()


def test_a_job_serves_two_models_on_nodes_of_their_own(
    cluster: Cluster, checkpoint: Path, tmp_path: Path, job_settings: dict[str, str]
) -> None:
    first, second, third = cluster.nodes
    file = tmp_path / "models.yaml"
    listed = [
        {"model_path": str(checkpoint), "served_model_names": ["one", "uno"]},
        {"model_path": str(checkpoint), "served_model_names": ["two"]},
    ]
    file.write_text(yaml.safe_dump({"models": listed}))
    plan = "one:encode:1 one:embed:1 two:agg:1"
    settings = job_settings | {"TESSERA_MODELS_FILE": str(file), "MODELS": plan}
    job = cluster.submit(SCRIPT, tmp_path / "log", "--nodes=3", **settings)
    job.wait_for_line(f"ready at http://{first}:8000", READY_SECONDS)
    workers = {
        (node, words[words.index("--namespace") + 1].rpartition("-")[2])
        for pid, node in cluster.tasks("tessera.worker").items()
        for words in [command_line(pid)]
    }
    assert workers == {(first, "one"), (second, "one"), (third, "two")}
    for name in ("uno", "two"):
        url = f"http://{cluster.address(first)}:8000/v1/embeddings"
        answer = httpx.post(url, json={"model": name, "input": "x"}, timeout=60)
        assert answer.status_code == 200, answer.text
    # At once: Slurm tells every step by itself.
    job.tell("scancel", job.number)
    assert job.wait_for_end(90) == "CANCELLED"
    assert left_of(cluster, job, tmp_path / "scratch") == []


def test_a_job_serves_over_three_nodes_and_drains(
    cluster: Cluster,
    checkpoint: Path,
    photos: dict[str, bytes],
    tmp_path: Path,
    job_settings: dict[str, str],
) -> None:
    first, second, third = cluster.nodes
    settings = job_settings | {
        "TESSERA_MODEL_PATH": str(checkpoint),
        "TESSERA_SERVED_MODEL_NAME": MODEL,
        # Nodes share a kernel here, and would find each other's memory.
        "EMBED_ARGS": '--override-engine-args {"transport":{"kind":"nixl","nixl_interfaces":"eth0"}}',
    }
    job = cluster.submit(SCRIPT, tmp_path / "log", "--nodes=3", **settings)
    job.wait_for_line(f"ready at http://{first}:8000", READY_SECONDS)
    assert set(cluster.tasks("tessera.frontend").values()) == {first}
    assert set(cluster.tasks("tessera.worker").values()) == {first, second, third}
    url = f"http://{cluster.address(first)}:8000/v1/embeddings"
    image = "data:image/jpeg;base64," + base64.b64encode(photos["flower"]).decode()
    body = {"model": MODEL, "input": ["a flower", [{"type": "image_url", "image_url": {"url": image}}]]}
    answer = httpx.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"]) == 2
    # The rows came over the network.
    metrics = [httpx.get(f"http://{cluster.address(node)}:9090/metrics").text for node in (second, third)]
    assert re.search(r'tessera_transfers_total\{outcome="ok",route="nixl"\} 1\.0', "".join(metrics)), metrics
    # What dies is started again.
    (victim,) = [pid for pid, node in cluster.tasks("tessera.worker").items() if node == first]
    os.kill(victim, signal.SIGKILL)
    job.wait_for_line("encode on", 120)
    job.tell("scancel", "--signal=TERM", "--batch", job.number)
    assert job.wait_for_end(90) == "COMPLETED", job.written()
    assert "tessera: draining" in job.written()
    assert left_of(cluster, job, tmp_path / "scratch") == []
