"""The choice between instances by what is in flight at each."""

from __future__ import annotations

from collections import Counter

from tessera.rpc import least_loaded


def test_the_smallest_load_is_chosen_and_ties_at_random() -> None:
    loads = {1: 5, 2: 3, 3: 3, 4: 9}
    counts = Counter(least_loaded(loads.keys(), loads) for _ in range(400))
    assert counts.keys() == {2, 3} and min(counts.values()) > 100
    # Instances without an entry have nothing in flight, and asking leaves none behind.
    units: Counter[int] = Counter({7: 1})
    counts = Counter(least_loaded([7, 8, 9], units) for _ in range(400))
    assert counts.keys() == {8, 9} and min(counts.values()) > 100
    assert units.keys() == {7}
