"""What is said of retrieval in one precision beside another, on vectors of which it is known."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.recall import NEAREST, Embedded, judged

pytestmark = pytest.mark.measures

COUNT = 40
OWN = np.arange(COUNT)


def embedded(queries: np.ndarray) -> Embedded:
    """Each item is an axis of its own."""
    items = np.eye(COUNT, dtype=np.float32)
    unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    return Embedded.of(items, unit.astype(np.float32))


def near(own: np.ndarray) -> np.ndarray:
    """Queries whose nearest item is their own, and the next ones those behind it, in a circle."""
    places = (np.arange(COUNT)[None] - own[:, None]) % COUNT
    return 1.0 / (1.0 + places)


def test_the_nearest_come_in_order() -> None:
    assert embedded(near(OWN)).nearest[7].tolist() == list(range(7, 7 + NEAREST))


def test_what_is_lost_is_the_share_of_queries_that_miss_now() -> None:
    base, moved = near(OWN), near(OWN)
    # A quarter of the queries looks from half a circle away.
    moved[::4] = near((OWN[::4] + COUNT // 2) % COUNT)
    found = judged(embedded(moved), embedded(base), OWN)
    assert found.first.value == found.among.value == pytest.approx(0.75)
    lost, low, high = found.lost
    assert lost == pytest.approx(0.25) and 0.05 < low < lost < high < 0.5
    assert found.overlap == pytest.approx(0.75) and found.cosine < 0.9
    assert found.among.low < 0.75 < found.among.high and found.first == found.among


def test_nothing_is_lost_to_itself() -> None:
    same = embedded(near(OWN))
    found = judged(same, same, OWN)
    assert found.first == found.among == (1, 1, 1) and found.overlap == 1
    assert found.lost == (0, 0, 0) and found.cosine == pytest.approx(1)
