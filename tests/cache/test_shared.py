"""A cache in memory that several processes map; here each arena has a writer of its own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256

import pytest

from tessera.cache import SharedCache

_WRITER = """
import random, sys
from tests.cache.test_shared import cache_of, key_of, value_of
cache = cache_of(int(sys.argv[1]), 1)
print("ready", flush=True)
number = 0
while True:
    number = (number + 1) % 5000
    cache.put(key_of(number), value_of(number))
"""


def cache_of(file: int, index: int, capacity: int = 1 << 20) -> SharedCache:
    return SharedCache(file, offset=4096, index=index, size=2, capacity=capacity, entry_bytes=256)


def key_of(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def value_of(number: int) -> bytes:
    return b"%d " % number * random.Random(number).randrange(1, 300)


@pytest.fixture
def file() -> Iterator[int]:
    made = os.memfd_create("test")
    yield made
    os.close(made)


def test_what_one_puts_the_other_finds_also_after_its_end(file: int) -> None:
    first, second = cache_of(file, 0), cache_of(file, 1)
    assert second.get(key_of(1)) is None
    first.put(key_of(1), b"one")
    first.put(key_of(2), b"")
    assert (second.get(key_of(1)), second.get(key_of(2))) == (b"one", b"")
    # The next in its place goes on behind it.
    third = cache_of(file, 0)
    third.put(key_of(3), b"three")
    assert [second.get(key_of(number)) for number in (1, 2, 3)] == [b"one", b"", b"three"]
    second.put(key_of(1), b"another")
    assert sorted(second.get_all(key_of(1))) == [b"another", b"one"]


def test_bytes_are_bounded_and_what_is_used_stays(file: int) -> None:
    cache, other = cache_of(file, 0), cache_of(file, 1)
    most = 1 << 20
    for number in range(20_000):
        cache.put(key_of(number), value_of(number))
        assert cache.used <= most // 2
        if number % 50 == 0:
            assert other.get(key_of(0)) == value_of(0)
    assert other.get(key_of(1)) is None
    assert other.get(key_of(19_999)) == value_of(19_999)
    kept = sum(other.get(key_of(number)) is not None for number in range(19_000, 20_000))
    assert kept > 300
    assert os.fstat(file).st_size <= 4096 + most + 8192


def test_what_is_larger_than_an_arena_is_not_kept(file: int) -> None:
    cache = cache_of(file, 0)
    cache.put(key_of(1), bytes(1 << 20))
    assert cache.get(key_of(1)) is None
    nothing = SharedCache(file, offset=1 << 22, index=0, size=2, capacity=0, entry_bytes=1)
    nothing.put(key_of(1), b"x")
    assert nothing.get(key_of(1)) is None


@pytest.mark.starts
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_writer_may_end_or_freeze_at_any_moment(file: int, ending: signal.Signals) -> None:
    """What is read is what was put, while a process writes over it and after it was stopped."""
    cache = cache_of(file, 0)
    found = 0
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(file)], stdout=subprocess.PIPE, pass_fds=[file]
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        try:
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                number = random.randrange(5000)
                value = cache.get(key_of(number))
                assert value in (None, value_of(number))
                found += value is not None
            writer.send_signal(ending)
            values = [cache.get(key_of(number)) for number in range(5000)]
            assert all(value in (None, value_of(number)) for number, value in enumerate(values))
            cache.put(key_of(5001), b"still")
            assert cache.get(key_of(5001)) == b"still"
        finally:
            writer.kill()
            writer.communicate()
    assert found
