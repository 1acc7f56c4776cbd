"""A frontend without workers, as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.e2e.service import MODEL, free_ports


@contextmanager
def frontend(
    checkpoint: Path, folder: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[httpx.Client]:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tessera.frontend", "--model-path", str(checkpoint)]
    command += ["--served-model-name", MODEL, "--port", str(port), "--discovery-backend", "file"]
    command += ["--worker-wait-seconds", "0", *flags]
    settings = os.environ | {"DYN_FILE_KV": str(folder / "discovery")} | dict(environment or {})
    process = subprocess.Popen(command, env=settings, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=url, timeout=30) as client:
            deadline = time.monotonic() + 60
            while not _answers(client):
                assert process.poll() is None, "the frontend ended"
                assert time.monotonic() < deadline, "the frontend does not answer"
                time.sleep(0.05)
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/live").status_code == 200
    except httpx.TransportError:
        return False
