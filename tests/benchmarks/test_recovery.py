"""How long faults are felt, from answers that are made up to show it."""

from __future__ import annotations

import math

import pytest
from benchmarks.faults import Answers, Kill, report
from benchmarks.recovery import Fault, Felt, felt, percentile


def answers(*spans: tuple[float, float]) -> list[tuple[float, float]]:
    """Ten a second for half a minute, half a second each within the spans and a tenth otherwise."""
    times = [at / 10 for at in range(300)]
    return [(at, 0.5 if any(first <= at < last for first, last in spans) else 0.1) for at in times]


def by_stretch(rows: list[Felt], kind: str) -> dict[float, float]:
    return {row.since: row.p99 for row in rows if row.kind == kind}


def test_what_is_never_felt() -> None:
    rows = felt(answers(), [Fault("embed", 10.0), Fault("embed", 20.0)])
    assert by_stretch(rows, "embed") == {0.0: 0.1, 1.0: 0.1, 2.0: 0.1, 4.0: 0.1, 8.0: 0.1}
    assert [row.answers for row in rows] == [100, 20, 20, 40, 80, 40]
    assert {row.chance for row in rows[1:]} == {0.1}


def test_what_is_felt_for_a_second_and_a_half() -> None:
    rows = felt(answers((10.0, 11.5)), [Fault("embed", 10.0)])
    assert by_stretch(rows, "embed") == {0.0: 0.5, 1.0: 0.5, 2.0: 0.1, 4.0: 0.1, 8.0: 0.1}
    assert [row.p50 for row in rows[1:3]] == [0.5, 0.1]


def test_each_kind_has_its_own_faults_and_a_stretch_ends_with_the_next() -> None:
    rows = felt(answers((13.0, 13.1)), [Fault("embed", 10.0), Fault("encode", 12.5), Fault("embed", 20.0)])
    assert by_stretch(rows, "encode")[0.0] == 0.5
    assert by_stretch(rows, "embed") == {0.0: 0.1, 1.0: 0.1, 2.0: 0.1, 4.0: 0.1, 8.0: 0.1}
    assert [row.answers for row in rows if row.kind == "embed"] == [20, 20, 25, 40, 20]


def test_chance_is_the_worst_of_as_many_before_any_fault() -> None:
    rows = felt(answers((5.0, 5.05), (12.0, 12.5)), [Fault("embed", 10.0)])
    assert rows[0].p99 == 0.1 and rows[0].slowest == 0.5
    # Of forty the slowest is the p99, of a hundred one may be slow.
    assert {row.since: row.chance for row in rows[1:]}[4.0] == 0.5
    assert felt(answers((5.0, 5.05))[:200], [Fault("embed", 10.0)])[-1].chance == 0.5
    late = felt(answers(), [Fault("embed", 1.0)])
    assert math.isnan(late[-1].chance)


def test_before_the_first_fault_there_may_be_nothing() -> None:
    rows = felt(answers(), [Fault("embed", 0.0)])
    assert rows[0].answers == 0 and math.isnan(rows[0].p99)


@pytest.mark.parametrize(("count", "slowest"), [(99, 99), (100, 99), (101, 100), (200, 198)])
def test_a_percentile_is_one_of_the_values(count: int, slowest: int) -> None:
    assert percentile(range(1, count + 1), 0.99) == slowest


def test_the_report_is_in_milliseconds() -> None:
    kills = [Kill(role="embed", at=10.0, replaced=6.0), Kill(role="encode", at=29.0, replaced=5.0)]
    assert report(Answers(good=answers((10.0, 11.0))), kills) == [
        ("nothing", "", "100", "100", "100", "100", ""),
        ("embed", "0 to 1", "10", "500", "500", "500", "100"),
        ("embed", "1 to 2", "10", "100", "100", "100", "100"),
        ("embed", "2 to 4", "20", "100", "100", "100", "100"),
        ("embed", "4 to 8", "40", "100", "100", "100", "100"),
        ("embed", "from 8", "110", "100", "100", "100", ""),
        ("encode", "0 to 1", "10", "100", "100", "100", "100"),
    ]
