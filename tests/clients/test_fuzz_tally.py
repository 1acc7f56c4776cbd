"""What the fuzz driver remembers between runs, and what it calls growth."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.clients.footprint import GROWTH_BYTES, GROWTH_DESCRIPTORS, Footprint, floor, footprints, growth
from tests.clients.fuzz import Outcome, Tally
from tests.clients.mutations import Mutator

FLAT = Footprint(resident=400 << 20, descriptors=35, shared=10 << 20)


def test_a_later_run_goes_on_where_one_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results"
    first = Tally(file)
    first.read()
    first.add(Outcome(7, Counter({200: 3, 400: 5}), refused=2), [os.getpid()])
    first.add(Outcome(8, Counter({200: 1}), failures=["case 0 of seed 8: answered 500"]), [os.getpid()])
    second = Tally(file)
    second.read()
    assert second.seeds == {7, 8}
    assert second.statuses == Counter({200: 4, 400: 5})
    assert (second.refused, second.failures) == (2, ["case 0 of seed 8: answered 500"])
    # What an earlier service held says nothing about this one.
    assert second.held == [] and second.grown() == []
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_equal_seeds_give_equal_cases() -> None:
    one, other, another = (Mutator(seed, 128) for seed in (5, 5, 6))
    cases = [one.request() for _ in range(50)]
    assert cases == [other.request() for _ in range(50)]
    assert cases != [another.request() for _ in range(50)]


@pytest.mark.parametrize(
    ("field", "limit"),
    [("resident", GROWTH_BYTES), ("descriptors", GROWTH_DESCRIPTORS), ("shared", GROWTH_BYTES)],
)
def test_growth_is_what_stays(field: str, limit: int) -> None:
    def held(more: int) -> dict[int, Footprint]:
        values = {name: getattr(FLAT, name) for name in ("resident", "descriptors", "shared")}
        return {1: Footprint(**(values | {field: values[field] + more}))}

    before = floor([held(0), held(limit // 2)])
    # A moment's work is no leak, and a leak is none before it is worth one.
    assert growth(before, floor([held(10 * limit), held(limit)])) == []
    (found,) = growth(before, floor([held(10 * limit), held(limit + 1)]))
    assert field in found and "process 1" in found


def test_a_process_that_was_started_again_is_found() -> None:
    assert len(growth({1: FLAT, 2: FLAT}, {1: FLAT, 3: FLAT})) == 2


def test_descriptors_and_memory_are_those_of_the_process() -> None:
    program = """
import sys
files = [open("/dev/null") for _ in range(50)]
memory = b"x" * (64 << 20)
print(flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        found = footprints([process.pid])[process.pid]
        process.stdin.close()
    assert found.descriptors >= 53
    assert found.resident >= 64 << 20
