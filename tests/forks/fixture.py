"""Forks for the tests of a file that starts commands or engines by ``subprocess``."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.forks.popen import fork_all


@pytest.fixture(scope="module")
def forks() -> Iterator[None]:
    """Fork the service's programs that tests of a module start, and those that the package starts in it."""
    executed = subprocess.Popen
    fork_all()
    yield
    subprocess.Popen = executed  # type: ignore[misc]
