"""The overload benchmark on the small checkpoint, for seconds: the shape of overload, not its figures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks.overload import main


@pytest.mark.service
@pytest.mark.measures
@pytest.mark.usefixtures("forks")
def test_a_flood_is_refused_and_the_rest_is_answered(checkpoint: Path) -> None:
    report = main(
        [
            *("--model-path", str(checkpoint), "--seconds", "4", "--calm", "2", "--warm", "1"),
            *("--inputs", "48", "--words", "120", "--factor", "6", "--concurrency", "2", "--clients", "3"),
            # A queue of a few requests is full on any machine.
            *("--tokens", "2048"),
        ]
    )
    assert report.refused > 0 and report.without_retry_after == 0
    assert report.failed == {}
    assert report.unsent == 0
    # The clients take processor time from the service here; figures are for a machine of their own.
    assert report.goodput > 0.2 * report.capacity
    # They were busy for longer than was sent.
    assert sum(report.storm_cores) <= len(os.sched_getaffinity(0)) + 0.05
    # A refusal waits for nothing.
    assert report.refused_p50 < report.good_p50
