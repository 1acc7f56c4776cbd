"""Processes of a deployment: started, waited for by asking, and ended by their ids."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.service import lasting_members
from tests.waiting import wait_until


def run_script(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@contextmanager
def running(
    command: Sequence[str | Path], environment: dict[str, str], log: Path, *, stop_seconds: float = 45.0
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a group of its own, ended with SIGTERM; nothing of the group may be left."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
        try:
            process.wait(stop_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            left = lasting_members(process.pid)
            if left:
                os.killpg(process.pid, signal.SIGKILL)
            assert not left, (left, log.read_text())


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path, *, timeout: float = 240.0) -> None:
    """Ask until the answer is 200, or the process has ended."""
    wait_until(
        lambda: httpx.get(url, timeout=5.0).status_code == 200,
        timeout,
        despite=httpx.TransportError,
        process=process,
        said=lambda: (url, log.read_text()),
    )


@contextmanager
def etcd(folder: Path, port: int, peer_port: int) -> Iterator[str]:
    """The endpoint of a real etcd server on loopback."""
    executable = shutil.which("etcd")
    if executable is None:
        pytest.skip("etcd is not installed (Debian package etcd-server)")
    endpoint = f"http://127.0.0.1:{port}"
    peer = f"http://127.0.0.1:{peer_port}"
    command = [executable, "--data-dir", str(folder / "etcd"), "--log-level", "error"]
    command += ["--listen-client-urls", endpoint, "--advertise-client-urls", endpoint]
    command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    command += ["--initial-cluster", f"default={peer}", "--unsafe-no-fsync"]
    log = folder / "etcd.log"
    with running(command, dict(os.environ), log) as process:
        wait_for(f"{endpoint}/health", process, log)
        yield endpoint
