"""``tessera serve``: the launcher without a checkout, from a folder that is not the repository's."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from tests.e2e.inputs import parts
from tests.e2e.service import ROOT, free_ports, group_members, lasting_members
from tests.signals import default_signals
from tests.waiting import wait_for_line

pytestmark = [pytest.mark.service, pytest.mark.usefixtures("forks")]

IMAGE = ROOT / "examples" / "images" / "pair-02.jpg"


def test_it_serves_from_anywhere_with_nothing_in_the_environment(checkpoint: Path, tmp_path: Path) -> None:
    port, system = free_ports(1)[0], free_ports(2)[0]
    folder = tmp_path / "work"
    folder.mkdir()
    # What lies where it is started from is not imported.
    (folder / "random.py").write_text("raise SystemExit('imported')")
    settings = {
        "encode_workers": 1,
        "embed_workers": 1,
        "frontends": 2,
        "max_inputs": 2,
        "override_engine_args": {"threads": 1},
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(settings))
    # Its name is the directory's, spaces and all.
    model = tmp_path / "a model"
    model.symlink_to(checkpoint)
    words = ["serve", str(model), "--config", "serve.yaml", "--frontends", "1", "--port", str(port)]
    log = tmp_path / "log"
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tessera.cli", *words, "--system-port-base", str(system)],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=default_signals,
        )
    try:
        wait_for_line(log, "tessera: ready at", process=process)
        body = {"model": "a model", "input": ["a text", parts(None, IMAGE.read_bytes())]}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/embeddings", json=body, timeout=60)
        assert len(answer.json()["data"]) == 2, answer.text
        body["input"] = ["one", "two", "three"]
        assert httpx.post(f"http://127.0.0.1:{port}/v1/embeddings", json=body).status_code == 400
        assert "1 frontend, 1 encode worker, 1 embed worker" in log.read_text()
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            assert process.wait(timeout=60) == 130, log.read_text()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert lasting_members(process.pid) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_what_kills_the_launcher_ends_the_service(checkpoint: Path, tmp_path: Path) -> None:
    port, system = free_ports(1)[0], free_ports(2)[0]
    log = tmp_path / "log"
    command = [sys.executable, "-P", "-m", "tessera.cli", "serve", str(checkpoint), "--port", str(port)]
    command += ["--system-port-base", str(system), "--encode-workers", "1", "--embed-workers", "1"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_for_line(log, "tessera: ready at", process=process)
        # Image decoders are processes below the encode worker.
        body = {"model": checkpoint.name, "input": [parts(None, IMAGE.read_bytes())]}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/embeddings", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert len(group_members(process.pid)) > 4
        second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        said = f"something listens on 127.0.0.1:{port} already: a Tessera with pid {process.pid}"
        assert second.returncode == 1 and said in second.stderr
        process.kill()
        process.wait(60)
        assert lasting_members(process.pid) == []
        # The port is free.
        socket.create_server(("127.0.0.1", port)).close()
    finally:
        if group_members(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_an_address_of_another_machine_is_named(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "tessera.cli", "serve", str(checkpoint), "--host", "192.0.2.1"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 1
    assert "--host 192.0.2.1: this machine has no address 192.0.2.1" in ended.stderr


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    program = f"""
mount -t tmpfs -o size=4k,nr_inodes=1 none '{tmp_path}' || exit 9
TMPDIR='{tmp_path}' exec '{sys.executable}' -P -m tessera.cli serve --port {free_ports(1)[0]}
"""
    ended = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", program],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if ended.returncode == 9 or "unshare" in ended.stderr:
        pytest.skip(f"no file system can be mounted here: {ended.stderr}")
    assert ended.returncode == 1
    says = r"No space left on device; TMPDIR names another place\n"
    assert re.fullmatch(rf"tessera: {tmp_path}/tessera-run\.\w+: {says}", ended.stderr)


def test_a_second_service_takes_other_ports_for_its_workers(checkpoint: Path, tmp_path: Path) -> None:
    ports = free_ports(2)
    taken: list[socket.socket] = []
    try:
        # Where the first one's workers are, or any other program.
        with suppress(OSError):
            taken.append(socket.create_server(("127.0.0.1", 8081)))
        log = tmp_path / "log"
        command = [
            sys.executable,
            "-P",
            "-m",
            "tessera.cli",
            "serve",
            str(checkpoint),
            "--port",
            str(ports[0]),
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=default_signals,
            )
        wait_for_line(log, "tessera: ready at", process=process)
        same = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        assert "already: a Tessera with pid" in same.stderr and "name another with" not in same.stderr
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        assert log.read_text().endswith("tessera: stopped\n")
        named = subprocess.run(
            [*command, "--system-port-base", "8081"], capture_output=True, text=True, timeout=180
        )
        assert "--system-port-base 8081: something listens on port 8081 already" in named.stderr
    finally:
        for each in taken:
            each.close()
        if group_members(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
