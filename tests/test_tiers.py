"""What ``tests/tiers.py`` says is what runs, and a frontend's tests import no more than they need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.service import ROOT
from tests.tiers import FIRST

pytestmark = pytest.mark.starts

SAMPLE = """
import pytest

def test_plain(): ...

@pytest.mark.gpu
def test_gpu(): ...

@pytest.mark.service
@pytest.mark.soak
def test_soak(): ...

@pytest.mark.service
def test_service(): ...

@pytest.mark.xdist_group("aoti")
def test_long(): ...
"""


def run(folder: Path, *options: str) -> list[str]:
    """The lines of a run of the sample that name a test."""
    (folder / "test_sample.py").write_text(SAMPLE)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(folder)]
    command += ["-p", "no:cacheprovider", "-p", "tests.tiers", *options, str(folder)]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [line for line in ran.stdout.splitlines() if "::test_" in line]


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        ("check", ["long", "plain"]),
        ("test", ["long", "service", "plain"]),
        ("all", ["long", "soak", "service", "plain", "gpu"]),
    ],
)
def test_a_tier_runs_its_tests_and_those_of_the_ones_below(
    tmp_path: Path, tier: str, expected: list[str]
) -> None:
    collected = run(tmp_path, "--tier", tier, "--collect-only", "-q")
    assert [line.partition("::test_")[2] for line in collected] == expected


@pytest.mark.parametrize(
    "marks",
    ["pytest.mark.service", "[\n    pytest.mark.skipif(False, reason=''),\n    pytest.mark.service,\n]"],
)
def test_a_file_outside_the_tier_is_not_even_imported(tmp_path: Path, marks: str) -> None:
    imported = tmp_path / "imported"
    source = (
        f"import pytest\n\npytestmark = {marks}\n\nopen({str(imported)!r}, 'w')\n\ndef test_of_it(): ...\n"
    )
    (tmp_path / "test_outside.py").write_text(source)
    assert len(run(tmp_path, "--tier", "check", "--collect-only", "-q")) == 2
    assert not imported.exists()
    assert len(run(tmp_path, "--tier", "test", "--collect-only", "-q")) == 4
    assert imported.exists()


def test_a_group_stays_in_one_process(tmp_path: Path) -> None:
    # pytest-xdist 3.8 groups nothing with pytest 9.2, and says nothing.
    lines = run(tmp_path, "-p", "xdist", "--numprocesses", "2", "--dist", "loadgroup", "-v")
    where = [line.split()[0] for line in lines if "PASSED" in line and "@aoti" not in line]
    assert len(where) == 4 and len(set(where)) == 1, lines


def test_the_groups_that_begin_exist() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in FIRST:
        assert (ROOT / "tests" / name).is_file() or f'pytest.mark.xdist_group("{name}")' in sources, name


def test_a_frontends_tests_import_no_torch() -> None:
    program = (
        "import sys, pytest\n"
        "assert pytest.main(['--collect-only', '-qq', '-p', 'no:cacheprovider', 'tests/frontend']) == 0\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
