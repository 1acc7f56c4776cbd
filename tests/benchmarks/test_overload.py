"""The overload benchmark on the small checkpoint, for seconds: the shape of overload, not its figures."""

from __future__ import annotations

from pathlib import Path

from benchmarks.overload import main


def test_a_flood_is_refused_and_the_rest_is_answered(checkpoint: Path) -> None:
    report = main(
        [
            *("--model-path", str(checkpoint), "--seconds", "6", "--calm", "3", "--warm", "2"),
            *("--inputs", "48", "--words", "120", "--factor", "6", "--concurrency", "8"),
        ]
    )
    assert report.refused > 0 and report.without_retry_after == 0
    assert report.failed == {}
    assert report.unsent == 0
    # What is answered is most of what can be: the clients take processor time from the service here.
    assert report.goodput > 0.5 * report.capacity
    # Every refusal was faster than any answer.
    assert report.refused_p99 < report.good_p50
