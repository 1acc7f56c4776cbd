"""The Slurm script: on three nodes that are network namespaces, with a stand-in for srun and a real etcd."""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deploy.conftest import run_script
from tests.deploy.processes import running, wait_for
from tests.e2e.service import MODEL, ROOT
from tests.proc import command_line

pytestmark = [pytest.mark.service, pytest.mark.operates, pytest.mark.timeout(900)]
SCRIPT = ROOT / "deploy/slurm/tessera.sbatch"
STAND_INS = Path(__file__).parent / "slurm"
# Addresses for tests of other networks (RFC 2544), which no real host should have.
NETWORK = "198.18.77"


@pytest.mark.parametrize("path", [SCRIPT, SCRIPT.with_name("task"), ROOT / "deploy/start-role"])
def test_the_scripts_are_sound(path: Path) -> None:
    assert run_script("bash", "-n", path).returncode == 0
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    ran = run_script(shellcheck, path)
    assert ran.returncode == 0, ran.stdout


def test_nodes_for_both_kinds_are_needed(tmp_path: Path) -> None:
    ran = run_script(
        *("bash", SCRIPT),
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_NODELIST="one",
        TESSERA_MODEL_PATH=str(tmp_path),
        PATH=f"{STAND_INS}:{os.environ['PATH']}",
    )
    assert ran.returncode == 1
    assert "ENCODE_NODES=1 must leave at least one of the job's 1 nodes to embed workers" in ran.stderr


def ip(*words: str) -> None:
    ran = run_script("ip", *words)
    if ran.returncode:
        pytest.skip(f"network namespaces are not permitted here (CAP_NET_ADMIN): {ran.stderr.strip()}")


@pytest.fixture
def nodes() -> Iterator[dict[str, str]]:
    """Three namespaces, one address each, behind one bridge: address to namespace."""
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed (Debian package iproute2)")
    mark = f"{os.getpid() % 100_000}"
    bridge = f"tsb{mark}"
    names = {f"{NETWORK}.{number}": f"tessera-{mark}-{number}" for number in (1, 2, 3)}
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("address", "add", f"{NETWORK}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number, (address, name) in enumerate(names.items()):
            ip("netns", "add", name)
            ip("link", "add", f"tsv{mark}{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"tsv{mark}{number}", "master", bridge, "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names.values():
            run_script("ip", "netns", "del", name)
        run_script("ip", "link", "del", bridge)


def tasks(nodes: dict[str, str], module: str) -> dict[int, str]:
    """The processes that run a module on the nodes, with the address of each."""
    found = {}
    for address, name in nodes.items():
        for pid in run_script("ip", "netns", "pids", name).stdout.split():
            command = command_line(int(pid))
            if module in command and "python" in command[0]:
                found[int(pid)] = address
    return found


def of_a_job(nodes: dict[str, str], scratch: Path) -> dict[str, str]:
    """The environment of a job's script."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed (Debian package etcd-server)")
    scratch.mkdir()
    return os.environ | {
        "PATH": f"{STAND_INS}:{os.environ['PATH']}",
        "NODE_NAMESPACES": ",".join(f"{address}={name}" for address, name in nodes.items()),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": ",".join(nodes),
        "VENV": str(Path(sys.executable).parents[1]),
        "TESSERA_READY_TIMEOUT_SECONDS": "120",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(scratch),
    }


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("a:text:1", "MODELS: 'a:text:1' is not NAME:ROLE:NODES"),
        ("a:agg:2 b:embed:2", "MODELS asks for 4 nodes, and the job has 1"),
        ("", "MODELS: says which nodes have workers of which model"),
    ],
)
def test_a_plan_that_cannot_be_is_named(tmp_path: Path, plan: str, said: str) -> None:
    ran = run_script(
        *("bash", SCRIPT),
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="one",
        TESSERA_MODELS_FILE=str(tmp_path),
        MODELS=plan,
        PATH=f"{STAND_INS}:{os.environ['PATH']}",
    )
    assert ran.returncode == 1
    assert said in ran.stderr


def test_a_job_serves_two_models_on_nodes_of_their_own(
    nodes: dict[str, str], checkpoint: Path, tmp_path: Path
) -> None:
    first, second, third = nodes
    file = tmp_path / "models.yaml"
    listed = [
        {"model_path": str(checkpoint), "served_model_names": ["one", "uno"]},
        {"model_path": str(checkpoint), "served_model_names": ["two"]},
    ]
    file.write_text(yaml.safe_dump({"models": listed}))
    environment = of_a_job(nodes, tmp_path / "scratch") | {
        "TESSERA_MODELS_FILE": str(file),
        "MODELS": "one:encode:1 one:embed:1 two:agg:1",
    }
    environment.pop("TESSERA_MODEL_PATH", None)
    log, url = tmp_path / "log", f"http://{first}:8000"
    with running(["bash", SCRIPT], environment, log, stop_seconds=60) as job:
        deadline = time.monotonic() + 180
        while f"ready at {url}" not in log.read_text():
            assert job.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        workers = {
            (node, words[words.index("--namespace") + 1].rpartition("-")[2])
            for pid, node in tasks(nodes, "tessera.worker").items()
            for words in [command_line(pid)]
        }
        assert workers == {(first, "one"), (second, "one"), (third, "two")}
        for name in ("uno", "two"):
            answer = httpx.post(f"{url}/v1/embeddings", json={"model": name, "input": "x"}, timeout=60)
            assert answer.status_code == 200, answer.text
    assert job.returncode == 0, log.read_text()
    assert [pid for module in ("tessera.frontend", "tessera.worker") for pid in tasks(nodes, module)] == []


def test_a_job_serves_over_three_nodes_and_drains(
    nodes: dict[str, str], checkpoint: Path, photos: dict[str, bytes], tmp_path: Path
) -> None:
    first, second, third = nodes
    scratch = tmp_path / "scratch"
    environment = of_a_job(nodes, scratch) | {
        "TESSERA_MODEL_PATH": str(checkpoint),
        "TESSERA_SERVED_MODEL_NAME": MODEL,
        # Nodes share a kernel here, and would find each other's memory.
        "EMBED_ARGS": '--override-engine-args {"transport":{"kind":"nixl","nixl_interfaces":"eth0"}}',
    }
    log = tmp_path / "log"
    url = f"http://{first}:8000"
    image = "data:image/jpeg;base64," + base64.b64encode(photos["flower"]).decode()
    body = {"model": MODEL, "input": ["a flower", [{"type": "image_url", "image_url": {"url": image}}]]}
    with running(["bash", SCRIPT], environment, log, stop_seconds=60) as job:
        wait_for(f"{url}/health", job, log)
        deadline = time.monotonic() + 120
        while f"ready at {url}" not in log.read_text():
            assert job.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        assert set(tasks(nodes, "tessera.frontend").values()) == {first}
        assert set(tasks(nodes, "tessera.worker").values()) == {first, second, third}
        answer = httpx.post(f"{url}/v1/embeddings", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["data"]) == 2
        # The rows came over the network.
        routes = "".join(httpx.get(f"http://{node}:9090/metrics").text for node in (second, third))
        assert re.search(r'tessera_transfers_total\{outcome="ok",route="nixl"\} 1\.0', routes), routes
        # What dies is started again.
        (victim, *_) = [pid for pid, node in tasks(nodes, "tessera.worker").items() if node == first]
        os.kill(victim, signal.SIGKILL)
        while "encode on" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
    assert job.returncode == 0, log.read_text()
    assert "tessera: draining" in log.read_text()
    assert [pid for module in ("tessera.frontend", "tessera.worker") for pid in tasks(nodes, module)] == []
    assert list(scratch.iterdir()) == []
    assert (
        subprocess.run(["ip", "netns", "pids", nodes[first]], capture_output=True, check=False).stdout == b""
    )
