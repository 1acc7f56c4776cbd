"""The windows of runs over a corpus."""

from __future__ import annotations

from benchmarks.bulk import Moment, Span, window


def test_a_window_ends_with_its_seconds() -> None:
    """A run that is told to end takes seconds for it, in which it says the same again and again."""
    span = Span(warm=2, seconds=4, limit=60)
    running: list[Moment] = [(float(at), 100 * at, 0.5 * at, "engine") for at in range(1, 9)]
    ending: list[Moment] = [(at, 800, 4.0 + 0.1 * at, "read") for at in (9.0, 10.0, 11.0)]
    found = window([(0.0, 0, 0.0, "start"), *running, *ending], 10_000, span)
    # The first items are there at 1 s, so it is from 3 to 7 s.
    assert (found.begin, found.end, found.rate, found.cores) == (3.0, 7.0, 100.0, 0.5)
    assert found.limit == "engine"
