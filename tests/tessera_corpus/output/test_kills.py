"""Runs that are killed, and what the next one makes of what they left."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.tessera_corpus.output.killed import AFTER, BEFORE
from tests.tessera_corpus.output.made import fill, opened, rows_in, texts_in

pytestmark = pytest.mark.kills


def killed(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
    )


def holds_no_id_twice(out: Path) -> bool:
    return all(count == 1 for count in Counter(row["id"] for row in rows_in(out)).values())


# A commit of Lance's does not go through Python.
@pytest.mark.parametrize("format", ["parquet", "openai"])
def test_a_kill_at_each_step(tmp_path: Path, format: str) -> None:
    child = killed("-m", "tests.tessera_corpus.output.killed", str(tmp_path), format)
    said, _ = child.communicate()
    assert child.returncode == 0
    shutil.rmtree(tmp_path / "before")
    outputs = list(tmp_path.iterdir())
    assert len(outputs) == int(said) > 60
    left = Counter[int]()
    for out in outputs:
        assert holds_no_id_twice(out)
        done = len(AFTER) - len(fill(opened(out, format=format), AFTER.items()))
        left[done] += 1
        assert texts_in(out, AFTER) == sorted(AFTER)
        assert not list(out.rglob("*.tmp"))
    # From before the first part to after the last.
    assert {19, len(AFTER)} <= left.keys() and len(left) > 3


@pytest.mark.parametrize("format", ["parquet", "lance", "openai"])
def test_kills_at_random(tmp_path: Path, format: str) -> None:
    fill(opened(tmp_path, part_rows=10, format=format), BEFORE.items())
    chance = random.Random(0)
    pauses = [chance.uniform(0, 0.05) for _ in range(5)]
    for pause in pauses:
        child = killed(
            "-c",
            "import sys, pathlib; from tests.tessera_corpus.output.killed import run_slowly; "
            "run_slowly(pathlib.Path(sys.argv[1]), sys.argv[2])",
            str(tmp_path),
            format,
        )
        assert child.stdout is not None and child.stdout.readline() == "started\n"
        try:
            child.wait(pause)
        except subprocess.TimeoutExpired:
            os.kill(child.pid, 9)
        child.communicate()
        assert holds_no_id_twice(tmp_path)
    fill(opened(tmp_path, format=format), AFTER.items())
    assert texts_in(tmp_path, AFTER) == sorted(AFTER)
