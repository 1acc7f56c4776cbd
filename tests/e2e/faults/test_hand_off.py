"""Readers and writers of vision rows that die, or take too long, in the middle of a hand-off."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.faults.conftest import ENCODE, Deployment
from tests.e2e.faults.test_processes import named, store_of, until, whole, whole_again
from tests.e2e.faults.traffic import PAUSE, Known, picture, traffic
from tests.e2e.service import ROOT
from tests.signals import signal_process

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("faults"), pytest.mark.usefixtures("forks")]

KINDS = ("shm", "nixl")


@contextmanager
def reader(deployment: Deployment, kind: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a handle from the first encode worker and has not read its rows."""
    image = tmp_path / "image.png"
    image.write_bytes(picture(77))
    environment = os.environ | {"DYN_FILE_KV": str(store_of(deployment.service)), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.faults.reader", kind, str(image), str(instance(deployment))],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == f"handle {kind}\n", line
        yield process
    finally:
        process.kill()
        process.communicate()


def instance(deployment: Deployment) -> int:
    """The first encode worker's instance, as its own metrics name it."""
    text = httpx.get(f"http://127.0.0.1:{deployment.service.worker_ports[ENCODE[0]]}/metrics").text
    found = re.search(r'worker_id="([0-9a-f]+)"', text)
    assert found is not None
    return int(found[1], 16)


def said(process: subprocess.Popen[str]) -> str:
    """What the reader says once it may read."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def leases(deployment: Deployment) -> float:
    return deployment.service.worker_metric(ENCODE[0], "tessera_slab_leases")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_reader_that_dies_with_a_handle_loses_its_lease(
    deployment: Deployment, tmp_path: Path, kind: str
) -> None:
    await whole(deployment)
    expired = deployment.service.worker_metric(ENCODE[0], "tessera_slab_expired_total")
    with reader(deployment, kind, tmp_path) as process:
        assert leases(deployment) == 1
        process.kill()
    await until(lambda: leases(deployment) == 0)
    assert deployment.service.worker_metric(ENCODE[0], "tessera_slab_expired_total") == expired + 1
    await whole(deployment)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_lease_that_runs_out_gives_no_other_image_s_rows(
    deployment: Deployment, known: list[Known], tmp_path: Path, kind: str
) -> None:
    await whole(deployment)
    with reader(deployment, kind, tmp_path) as process:
        await until(lambda: leases(deployment) == 0)
        # Others write where its rows were.
        async with traffic(deployment.urls, known, pause=PAUSE) as running:
            await asyncio.sleep(1.0)
        assert running.errors == []
        assert await asyncio.to_thread(said, process) == "error lease_expired"
    await whole(deployment)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_writer_that_dies_is_an_error_or_the_right_rows(
    deployment: Deployment, tmp_path: Path, kind: str
) -> None:
    await whole(deployment)
    with reader(deployment, kind, tmp_path) as process:
        signal_process(named(deployment, ENCODE[0]), signal.SIGKILL)
        await asyncio.sleep(0.2)
        answer = await asyncio.to_thread(said, process)
    # Shared memory outlives its writer; whatever is read is checked against the writer's own checksum.
    assert answer.startswith("rows (64,") or answer in (
        "error transport_unavailable",
        "error hand_off_failed",
        "error lease_expired",
    )
    print(f"writer killed, {kind}: {answer}")
    await whole_again(deployment)
    await whole(deployment)
