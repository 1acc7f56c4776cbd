"""The cache of vision rows: order, bytes, and what it refuses."""

from __future__ import annotations

from collections import OrderedDict

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.cache import EmbeddingCache

ROW = 4 * 8  # bytes of one float32 row of width 8


def rows(count: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((count, 8), value)


def test_the_least_recently_used_entry_goes_first() -> None:
    cache = EmbeddingCache(3 * ROW)
    for name in (b"a", b"b", b"c"):
        assert cache.put(name, rows(1))
    assert cache.get(b"a") is not None
    cache.put(b"d", rows(1))
    assert cache.get(b"b") is None
    assert all(cache.get(name) is not None for name in (b"a", b"c", b"d"))
    assert (len(cache), cache.used, cache.evictions) == (3, 3 * ROW, 1)
    assert (cache.hits, cache.misses) == (4, 1)


def test_a_large_entry_evicts_as_many_as_it_needs() -> None:
    cache = EmbeddingCache(4 * ROW)
    for name in (b"a", b"b", b"c", b"d"):
        cache.put(name, rows(1))
    cache.put(b"e", rows(3))
    assert [cache.get(name) is not None for name in (b"a", b"b", b"c", b"d", b"e")] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert cache.used == 4 * ROW


def test_replacing_an_entry_counts_its_bytes_once() -> None:
    cache = EmbeddingCache(4 * ROW)
    cache.put(b"a", rows(3))
    cache.put(b"b", rows(1))
    cache.put(b"a", rows(2, 1.0))
    found = cache.get(b"a")
    assert found is not None and found.shape == (2, 8) and bool((found == 1).all())
    assert (len(cache), cache.used, cache.evictions) == (2, 3 * ROW, 0)


def test_an_entry_larger_than_the_cache_is_refused_and_evicts_nothing() -> None:
    cache = EmbeddingCache(2 * ROW)
    cache.put(b"a", rows(2))
    assert not cache.put(b"b", rows(3))
    assert cache.get(b"a") is not None and cache.get(b"b") is None
    assert cache.refused == 1


def test_a_capacity_of_zero_stores_nothing() -> None:
    cache = EmbeddingCache(0)
    assert not cache.put(b"a", rows(1))
    assert cache.get(b"a") is None
    assert (len(cache), cache.used, cache.capacity) == (0, 0, 0)


def test_an_evicted_entry_stays_whole_for_its_reader() -> None:
    cache = EmbeddingCache(ROW)
    cache.put(b"a", rows(1, 1.0))
    held = cache.get(b"a")
    cache.put(b"b", rows(1, 2.0))
    assert cache.get(b"a") is None
    assert held is not None and bool((held == 1).all())


@settings(max_examples=100, deadline=None)
@given(
    capacity=st.integers(0, 10),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(1, 12)), max_size=60),
)
def test_it_agrees_with_a_plain_model(capacity: int, steps: list[tuple[bool, int, int]]) -> None:
    cache = EmbeddingCache(capacity * ROW)
    model: OrderedDict[bytes, int] = OrderedDict()
    for is_put, name, size in steps:
        key = bytes([name])
        if not is_put:
            assert (cache.get(key) is not None) == (key in model)
            if key in model:
                model.move_to_end(key)
        elif cache.put(key, rows(size)):
            assert size <= capacity
            model.pop(key, None)
            while sum(model.values()) + size > capacity:
                model.popitem(last=False)
            model[key] = size
        else:
            assert size > capacity
        assert cache.used == ROW * sum(model.values()) <= capacity * ROW
        assert len(cache) == len(model)
