"""Forks for the tests of a file that starts commands or engines by ``subprocess``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.forks.popen import fork_all
from tests.forks.program import THREADS, imported_with


def pytest_collection_finish() -> None:
    """Take over what libraries have set as the tests imported them: what is executed from now on has it.

    Eight variables in a whole run. With the environment of before nothing forked in one.
    """
    imported_with.update(os.environ | {THREADS: imported_with[THREADS]})


@pytest.fixture(scope="module")
def forks() -> Iterator[None]:
    """Fork the service's programs that tests of a module start, and those that the package starts in it."""
    executed = subprocess.Popen
    fork_all()
    yield
    subprocess.Popen = executed  # type: ignore[misc]
