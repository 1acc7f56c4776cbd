"""Fixtures that every test may use: real photographs and a checkpoint.

What several folders use besides stands in plugins: the reference, and the service of tests that only ask.
Nothing of this imports torch before a test needs it: most tests of a frontend never do, and it takes seconds.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.ports import PORTS, share
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from httpx._transports import default as httpx_transports
from hypothesis import HealthCheck, settings

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import TINY

# The first of them is imported by the second.
pytest_plugins = [
    "tests.groups",
    "tests.tiers",
    "tests.references.fixture",
    "tests.forks.fixture",
    "tests.shared_service",
]

# A busy machine is no reason to fail.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# Every client of httpx reads the certificates of all authorities anew, and each ``httpx.get`` makes a client:
# 30 ms of processor time, most of what a test spends that asks a service again and again until it is ready.
httpx_transports.create_ssl_context = functools.cache(httpx_transports.create_ssl_context)
# 5 s without an answer are an error of httpx, but none of a busy machine.
for _part in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, _part, 60.0)

# Ignored in what a shell starts in the background, and then in all that is started from there: no Ctrl-C
# would reach a launch script.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart() -> None:
    # Collecting the tests imports all libraries of all of them in each process: 8.8 s of processor time each
    # without the garbage collector, 10.3 s with it.
    gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        # Beside one another, processes would find the same ports free.
        os.environ[PORTS] = share(int(worker["workerid"].removeprefix("gw")), worker["workercount"])


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # Libraries that tests import later are looked through with each collection of all generations: of 21 s of
    # processor time of three families' tests 1.7 s, with the interpreter's own 700.
    gc.set_threshold(10_000)
    # The machine's cores are shared with the processes that the tests start.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _signals_arrive() -> Iterator[None]:
    """What a test starts afterwards would inherit a blocked signal, and never end by it."""
    yield
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What is left of a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def photos() -> dict[str, bytes]:
    """Two real photographs, 640x427 JPEG each."""
    # Its files are all that is wanted of it.
    found = importlib.util.find_spec("sklearn")
    assert found is not None and found.origin is not None
    folder = Path(found.origin).parent / "datasets" / "images"
    return {name: (folder / f"{name}.jpg").read_bytes() for name in ("china", "flower")}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint, which also offers two narrower widths.

    A tile of 512 pixels takes 25 ms of the encoder, one of 256 takes 3; a photograph is seven of either.
    """
    path = tmp_path_factory.mktemp("models") / "tessera-random"
    write_checkpoint(path, replace(TINY, image_size=256, dimensions=(32, 64)), seed=0)
    return path
