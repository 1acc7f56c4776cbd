"""When the p99 is back after a fault, from answers that are made up to show it."""

from __future__ import annotations

import math

import pytest
from benchmarks.faults import Answers, Kill, recoveries, report

STEADY = [(at / 10, 0.1) for at in range(300)]
"""Ten answers a second for half a minute, a tenth of a second each."""


def slowed(*spans: tuple[float, float]) -> list[tuple[float, float]]:
    return [(at, 0.5 if any(a <= at < b for a, b in spans) else took) for at, took in STEADY]


def back_after(answers: list[tuple[float, float]], faults: list[float]) -> tuple[float, list[float]]:
    return recoveries(answers, faults, window=20)


def test_nothing_to_recover_from() -> None:
    assert back_after(STEADY, [10.0, 20.0]) == (0.1, [0.0, 0.0])


def test_a_fault_is_over_when_the_last_slow_answer_has_come() -> None:
    level, back = back_after(slowed((10.0, 11.45), (20.0, 20.25)), [10.0, 20.0])
    assert level == 0.1
    assert back == pytest.approx([1.4, 0.2])


def test_of_a_hundred_answers_one_may_be_slow() -> None:
    one, two = slowed((15.0, 15.05)), slowed((15.0, 15.15))
    assert recoveries(one, [12.0], window=100) == (0.1, [0.0])
    assert recoveries(two, [12.0], window=100) == (0.1, [pytest.approx(3.0)])


def test_a_relapse_counts_and_what_comes_after_the_next_fault_does_not() -> None:
    _, back = back_after(slowed((10.0, 10.2), (13.0, 13.05), (25.0, 25.05)), [10.0, 20.0])
    assert back == pytest.approx([3.0, 5.0])


def test_the_level_is_the_worst_before() -> None:
    level, back = back_after(slowed((5.0, 5.05), (12.0, 12.05)), [10.0])
    assert (level, back) == (0.5, [0.0])


def test_too_few_answers_say_nothing() -> None:
    level, back = back_after(STEADY, [10.0, 11.0])
    assert level == 0.1 and math.isnan(back[0]) and back[1] == 0.0
    assert math.isnan(back_after(STEADY, [1.0])[0])


def test_the_report_has_a_row_for_each_kill() -> None:
    answers = Answers(good=slowed((10.0, 11.0)))
    kills = [
        Kill(role="nothing", at=5.0, replaced=0.0),
        Kill(role="embed", at=10.0, replaced=6.0),
        Kill(role="encode", at=20.0, replaced=5.0),
    ]
    assert report(answers, kills, window=20) == [
        ("nothing", "100", "100", "0.0", "0.0"),
        ("embed", "100", "500", "0.9", "6.0"),
        ("encode", "100", "100", "0.0", "5.0"),
    ]
