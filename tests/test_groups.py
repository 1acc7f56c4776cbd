"""What the tests of a group share ends with the group, and not with all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.service import ROOT

pytestmark = pytest.mark.starts

SHARED = """
import pytest
from tests.groups import group_fixture

@group_fixture
def service():
    print("service begins")
    yield 8000
    print("service ends")

@group_fixture
def client(service):
    print("client begins")
    yield service + 1
    print("client ends")

@pytest.fixture(scope="session")
def weights():
    print("weights begin")
    yield
    print("weights end")
"""
TESTS = """
import pytest

pytestmark = pytest.mark.xdist_group("{group}")

def test_one(client, weights): print("{group} one", client)

def test_two(service, weights): print("{group} two", service)
"""


def test_it_ends_with_the_last_test_of_its_group(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(SHARED)
    for name, group in (("a", "corpus"), ("b", "corpus"), ("c", "several")):
        (tmp_path / f"test_{name}.py").write_text(TESTS.format(group=group))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        "/dev/null",
        "--rootdir",
        str(tmp_path),
        "-qqs",
        "--disable-warnings",
    ]
    command += ["-p", "no:cacheprovider", "-p", "tests.groups", "-p", "tests.tiers", str(tmp_path)]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    # Each test is followed by pytest's dot.
    found = [line.lstrip(".") for line in ran.stdout.splitlines()]

    def group(name: str, files: int) -> list[str]:
        tests = [f"{name} one 8001", f"{name} two 8000"] * files
        return [*tests, "client ends", "service ends"]

    begins = ["service begins", "client begins"]
    corpus, several = group("corpus", 2), group("several", 1)
    assert [line for line in found if line] == [
        *begins,
        "weights begin",
        *corpus,
        *begins,
        *several,
        "weights end",
    ]
