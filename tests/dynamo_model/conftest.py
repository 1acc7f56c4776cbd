"""Dynamo's own frontend, unmodified, in front of the workers that other tests share.

It lives in an environment of its own, which ``scripts/dynamo-frontend`` makes. Where that cannot be had,
these tests are skipped and say why; ``TESSERA_DYNAMO_SECONDS`` bounds how long the installation may take.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.disaggregated import OTHER_NAME, Disaggregated
from tests.e2e.service import MODEL, ROOT, free_ports
from tests.groups import group_fixture
from tests.waiting import wait_until

INSTALL_SECONDS = float(os.environ.get("TESSERA_DYNAMO_SECONDS", "240"))


@pytest.fixture(scope="session")
def dynamo_python() -> str:
    script = ROOT / "scripts" / "dynamo-frontend"
    try:
        ran = subprocess.run(
            [str(script)], capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(
            f"ai-dynamo was not installed within {INSTALL_SECONDS:.0f} s; {script} goes on from there"
        )
    if ran.returncode != 0:
        pytest.skip(f"ai-dynamo cannot be installed here: {ran.stderr[-300:]}")
    return ran.stdout.strip()


@group_fixture
def stock(
    service: Disaggregated, dynamo_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A client of the stock frontend, which has found the model under each of its names."""
    log = tmp_path_factory.mktemp("stock") / "log"
    with stock_frontend(dynamo_python, service.store, log, (MODEL, OTHER_NAME)) as client:
        yield client


@contextmanager
def stock_frontend(python: str, store: Path, log: Path, models: Sequence[str]) -> Iterator[httpx.Client]:
    """A client of a stock frontend, once it has found ``models`` by the discovery below ``store``."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    command += ["--discovery-backend", "file"]
    environment = os.environ | {"DYN_FILE_KV": str(store), "DYN_TCP_RPC_HOST": "127.0.0.1"}
    environment |= {"DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1", "DYN_LOG": "warn"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_listed(url, process, log, models)
        with httpx.Client(base_url=url, timeout=60) as client:
            yield client
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_listed(url: str, process: subprocess.Popen[bytes], log: Path, models: Sequence[str]) -> None:
    names = {name + side for name in models for side in ("", "-query", "-passage")}
    wait_until(
        lambda: names <= {model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]},
        240,
        despite=httpx.TransportError,
        process=process,
        said=log.read_text,
    )
