"""The launch scripts: what they say when they cannot start, and that they leave nothing behind."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from benchmarks.proc import children
from PIL import Image

from tessera.rpc import FORGOTTEN
from tests.e2e.inputs import parts
from tests.e2e.service import (
    MODEL,
    ROOT,
    Service,
    free_ports,
    group_members,
    group_pids,
    lasting_members,
    launch,
)
from tests.proc import command_line
from tests.shared_memory import mapped
from tests.signals import freeze
from tests.waiting import wait_for_line, wait_until

pytestmark = pytest.mark.service


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """Where the scripts put their temporary directories."""
    path = tmp_path / "tmp"
    path.mkdir()
    return path


def run(script: str, checkpoint: Path, scratch: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run a script that cannot start; its status and what it said."""
    ports = free_ports(3)
    settings = {
        "TESSERA_MODEL_PATH": str(checkpoint),
        "TESSERA_SERVED_MODEL_NAME": MODEL,
        "TESSERA_PORT": str(ports[0]),
        "TESSERA_SYSTEM_PORT_BASE": str(ports[1]),
        "TMPDIR": str(scratch),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [str(ROOT / "launch" / script), *arguments],
        env=os.environ | settings | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert lasting_members(process.pid) == []
    assert list(scratch.iterdir()) == []
    return process.returncode, said.decode()


@pytest.mark.parametrize(
    ("script", "others"), [("agg.sh", "TESSERA_ENCODE_WORKERS"), ("e_p.sh", "nothing else")]
)
def test_help_comes_before_anything_else(script: str, others: str, scratch: Path) -> None:
    status, said = run(script, Path("/nowhere/model"), scratch, "--colour", "--help", TESSERA_FRONTENDS="two")
    assert status == 0
    assert said.startswith(f"usage: ./launch/{script}")
    assert re.search(
        r"^  TESSERA_MODALITY \(multimodal\)\n      text makes embed workers", said, re.MULTILINE
    )
    assert others not in said and "|" not in said and "`" not in said


def test_a_model_that_is_not_there_is_named(scratch: Path) -> None:
    status, said = run("agg.sh", Path('/nowhere/"\\\t'), scratch, TESSERA_LOG_FORMAT="json")
    assert status == 1
    line = json.loads(said)
    assert (line["level"], line["role"]) == ("ERROR", "launch")
    assert (
        line["message"]
        == 'tessera: TESSERA_MODEL_PATH=/nowhere/"\\ : no such directory; a model of a hub is ORG/NAME'
    )


@pytest.mark.parametrize("script", ["agg.sh", "e_p.sh"])
def test_an_unknown_key_is_named_with_its_file(
    script: str, checkpoint: Path, scratch: Path, tmp_path: Path
) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("text:\n  max_batch_csot: 5\n")
    wrong = {
        name: str(config)
        for name in ("TESSERA_AGG_ENGINE_ARGS", "TESSERA_ENCODE_ENGINE_ARGS", "TESSERA_EMBED_ENGINE_ARGS")
    }
    status, said = run(script, checkpoint, scratch, **wrong, TESSERA_LOG_FORMAT="json")
    assert status == 1
    # The installation comes before any process.
    lines = [json.loads(line) for line in said.splitlines() if not line.startswith("tessera: installing")]
    errors = [line["message"] for line in lines if line["level"] == "ERROR"]
    assert any(str(config) in error and "max_batch_csot" in error for error in errors)
    said = r".* worker 0 \(pid \d+\) ended with status 1 before the service was ready"
    assert any(re.fullmatch(said, error) for error in errors)
    assert any(error.startswith("tessera: the service did not become ready") for error in errors)
    assert not any("exception" in line for line in lines)


def test_a_port_in_use_is_named(checkpoint: Path, scratch: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, said = run("agg.sh", checkpoint, scratch, TESSERA_PORT=port)
    assert status == 1
    assert port in said and "listens" in said


def test_what_is_no_number_is_named(checkpoint: Path, scratch: Path) -> None:
    status, said = run("e_p.sh", checkpoint, scratch, TESSERA_EMBED_WORKERS="two")
    assert (status, said) == (1, "tessera: TESSERA_EMBED_WORKERS=two: is not a whole number\n")


def test_an_unknown_flag_is_named(checkpoint: Path, scratch: Path) -> None:
    status, said = run("agg.sh", checkpoint, scratch, "--colour", "blue")
    assert status == 1
    assert "--colour" in said


@contextmanager
def started(checkpoint: Path, scratch: Path, script: str = "e_p.sh") -> Iterator[Service]:
    workers = 1 if script == "agg.sh" else 2
    log = scratch.parent / "log"
    with launch(script, checkpoint, log, workers=workers, environment={"TMPDIR": str(scratch)}) as service:
        yield service


@pytest.mark.parametrize(
    ("number", "to_group", "status"),
    [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143), (signal.SIGHUP, True, 129)],
    ids=["Ctrl-C", "SIGTERM to the script", "the terminal is closed"],
)
def test_what_is_in_flight_is_answered_and_nothing_is_left(
    checkpoint: Path, scratch: Path, number: signal.Signals, to_group: bool, status: int
) -> None:
    with started(checkpoint, scratch) as service, ThreadPoolExecutor(6) as pool:
        assert list(scratch.iterdir()) != []
        group = service.script.pid
        shared = mapped(group_pids(group))
        with slow_body(service) as finish:
            answers = [pool.submit(embed_images, service, request) for request in range(6)]
            # The slow one among them.
            wait_until(lambda: sum(answer.done() for answer in answers) + taken(service) == 7)
            (os.killpg if to_group else os.kill)(group, number)
            # A worker without work would have left by then.
            time.sleep(1.0)
            assert b" 200 " in finish()
        assert [answer.result() for answer in answers] == [200] * 6
        assert service.script.wait(timeout=60) == status
        assert lasting_members(group) == []
    assert list(scratch.iterdir()) == []
    assert [file for file in shared if file.exists()] == []


def taken(service: Service) -> float:
    return service.frontend_metric("tessera_requests_in_flight")


def embed_images(service: Service, request: int) -> int:
    """Ask for two images that no cache holds; the answer's status."""
    inputs = []
    for image in range(2):
        file = io.BytesIO()
        Image.new("RGB", (600 + request, 400 + image)).save(file, "JPEG")
        inputs.append(parts(None, file.getvalue()))
    body = {"model": MODEL, "input": inputs}
    return httpx.post(f"{service.url}/v1/embeddings", json=body, timeout=60).status_code


@contextmanager
def slow_body(service: Service) -> Iterator[Callable[[], bytes]]:
    """Send half of a request; what is yielded sends the rest and returns the status line."""
    body = json.dumps({"model": MODEL, "input": "slow"}).encode()
    address = httpx.URL(service.url)
    with socket.create_connection((address.host, address.port or 80), timeout=60) as connection:
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {address.host}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:10])

        def finish() -> bytes:
            connection.sendall(body[10:])
            with connection.makefile("rb") as answer:
                return answer.readline()

        yield finish


def test_ctrl_c_before_it_is_ready(checkpoint: Path, scratch: Path) -> None:
    ports = free_ports(2)
    process = subprocess.Popen(
        [str(ROOT / "launch" / "agg.sh")],
        env=os.environ
        | {
            "TESSERA_MODEL_PATH": str(checkpoint),
            "TESSERA_PORT": str(ports[0]),
            "TESSERA_SYSTEM_PORT_BASE": str(ports[1]),
            "TMPDIR": str(scratch),
        },
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_until(lambda: len(group_members(process.pid)) >= 4)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert lasting_members(process.pid) == []
    assert list(scratch.iterdir()) == []


def test_what_ends_is_started_again_and_a_frozen_worker_ends_with_the_rest(
    checkpoint: Path, scratch: Path
) -> None:
    with started(checkpoint, scratch, "agg.sh") as service:
        frontend, worker = service.pids()
        # In the same instant, as far as the script can tell.
        freeze(service.script.pid)
        for pid in (frontend, worker):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: service.pids() == [])
        os.kill(service.script.pid, signal.SIGCONT)
        # The dead one stays listed until its lease has run out; what matters is who answers.
        answers_again(service)
        log = service.log.read_text()
        assert re.search(rf"frontend \(pid {frontend}\) ended with status 137", log)
        assert re.search(rf"agg worker 0 \(pid {worker}\) ended with status 137", log)
        # The runtime goes deaf when the directory of file discovery is removed.
        (store,) = scratch.iterdir()
        shutil.rmtree(store)
        wait_until(lambda: service.log.read_text().count(f"ended with status {FORGOTTEN}") == 2)
        answers_again(service)
        new = next(pid for pid in service.pids() if "tessera.worker" in command_line(pid))
        freeze(new)
        os.killpg(service.script.pid, signal.SIGINT)
        assert service.script.wait(timeout=60) == 130
        assert lasting_members(service.script.pid) == []


_THREE = """
import os, sys
from tessera.launch.children import Signals, Told
from tessera.launch.report import Report
from tessera.launch.supervisor import Supervisor
supervisor = Supervisor(Signals(), Report("text"), 40)
for number in (1, 2, 3):
    supervisor.start(f"child {number}", "agg", ["sleep", "1000"], os.environ)
try:
    supervisor.supervise()
except Told as told:
    supervisor.stop()
    sys.exit(told.status)
"""


@pytest.mark.parametrize("count", [2, 3])
def test_all_that_are_killed_in_the_same_instant_are_started_again(tmp_path: Path, count: int) -> None:
    def sleepers() -> list[int]:
        return [pid for pid in children(script.pid) if command_line(pid) == ["sleep", "1000"]]

    log = tmp_path / "log"
    with log.open("wb") as output:
        script = subprocess.Popen([sys.executable, "-c", _THREE], stderr=output)
    try:
        wait_until(lambda: len(sleepers()) == 3)
        killed = sleepers()[:count]
        freeze(script.pid)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(sleepers()) == 3 - count)
        os.kill(script.pid, signal.SIGCONT)
        wait_until(lambda: len(sleepers()) == 3)
        said = log.read_text().splitlines()
        assert sorted(line.split("(")[1].split(";")[0] for line in said) == sorted(
            f"pid {pid}) ended with status 137" for pid in killed
        )
    finally:
        script.send_signal(signal.SIGCONT)
        script.terminate()
        assert script.wait(timeout=60) == 143


def answers_again(service: Service) -> None:
    def answers() -> bool:
        try:
            body = {"model": MODEL, "input": "again"}
            return httpx.post(f"{service.url}/v1/embeddings", json=body, timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    wait_until(answers)


def test_ctrl_c_while_a_worker_waits_to_be_started_again(checkpoint: Path, scratch: Path) -> None:
    with started(checkpoint, scratch, "agg.sh") as service:
        os.kill(service.pids()[1], signal.SIGKILL)
        wait_for_line(service.log, "starting it again")
        os.killpg(service.script.pid, signal.SIGINT)
        assert service.script.wait(timeout=60) == 130
        assert lasting_members(service.script.pid) == []
