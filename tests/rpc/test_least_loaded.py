"""The choice between instances by what is in flight at each."""

from __future__ import annotations

from collections import Counter

from tessera.rpc import Loads


def test_the_smallest_load_is_chosen_and_ties_at_random() -> None:
    loads = Loads()
    for instance, load in {1: 5, 2: 3, 3: 3, 4: 9}.items():
        loads.add(instance, load)
    counts = Counter(loads.least((1, 2, 3, 4)) for _ in range(400))
    assert counts.keys() == {2, 3} and min(counts.values()) > 100
    # Instances without an entry have nothing in flight, and asking leaves none behind.
    units = Loads()
    units.add(7, 1)
    counts = Counter(units.least([7, 8, 9]) for _ in range(400))
    assert counts.keys() == {8, 9} and min(counts.values()) > 100
    assert units._loads == {7: 1}
    units.add(7, -1)
    assert units[7] == 0 and units._loads == {}
