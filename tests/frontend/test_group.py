"""What frontends of one host share, with a second one that is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tessera.errors import Overloaded, RateLimited
from tessera.frontend.admission.rate import RateLimiter
from tessera.frontend.admission.room import Admission, Capacity
from tessera.frontend.group import TOKEN_RATE, FrontendGroup, Seat
from tests.signals import freeze, signal_process

_CHILD = """
import sys
from tests.frontend.test_group import Frontend
frontend = Frontend(int(sys.argv[1]), 1)
print("ready", flush=True)
for line in sys.stdin:
    method, *arguments = line.split()
    print(getattr(frontend, method)(*arguments), flush=True)
"""


class Frontend:
    """What a frontend has of the table: 100 requests, 1000 tokens, and 6 requests and 600 tokens a minute."""

    def __init__(self, table: int, index: int) -> None:
        self.group = FrontendGroup(Seat(name="x", index=index, size=2, sockets=(), table=table))
        capacity = Capacity(lambda: 1000, lambda: 1000, unknown=1)
        self.admission = Admission(max_requests=100, max_response_bytes=1 << 30, group=self.group)
        self.room = self.admission.open_room("m", capacity)
        # Its time stands: a bucket is not filled while a process starts.
        self.rates = RateLimiter(
            ("a", "b"), requests_per_minute=6, tokens_per_minute=600, group=self.group, clock=lambda: 1000.0
        )
        self.look()

    def look(self) -> None:
        self.group.pulse({"m": (1, 0)})

    def hold(self, client: str, tokens: str, requests: str) -> bool:
        """Let requests in that stay; false when one was refused."""
        try:
            for _ in range(int(requests)):
                self.admission.enter(client, 0).charge(int(tokens), 0, 0)
        except Overloaded:
            return False
        return True

    def ask(self, key: str, tokens: str) -> bool:
        """Whether a request is within a key's rates."""
        try:
            self.rates.admit(key)
            self.rates.charge(key, int(tokens))
        except RateLimited:
            return False
        return True


class Other:
    """The same in a process."""

    def __init__(self, table: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(table)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[table],
        )
        assert self._line() == "ready"

    def __call__(self, *words: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def other(table: int) -> Iterator[Other]:
    made = Other(table)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def table() -> Iterator[int]:
    made = os.memfd_create("test")
    yield made
    os.close(made)


def test_what_one_holds_counts_at_the_other_until_it_ends(table: int) -> None:
    here = Frontend(table, 0)
    with other(table) as there:
        assert there("hold", "a", "100", "7") == "True"
        here.look()
        assert (here.admission.requests.used, here.room.tokens.used) == (7, 700)
        # a holds more than its share of what is left; b finds room.
        assert not here.hold("a", "150", "1")
        assert here.hold("b", "150", "1")
        freeze(there.process.pid)
        assert not here.hold("b", "200", "1")
        signal_process(there.process.pid, 9)
        there.process.wait()
        assert here.hold("a", "600", "1")
    # The next one in its place holds nothing.
    with other(table) as there:
        here.look()
        assert here.admission.requests.used < 7
        assert there("hold", "b", "1", "1") == "True"


def test_requests_are_counted_together(table: int) -> None:
    here = Frontend(table, 0)
    with other(table) as there:
        assert there("hold", "a", "1", "60") == "True"
        here.look()
        # Its share of what a leaves, and what is left then.
        assert not here.hold("b", "1", "33")
        assert here.admission.requests.used == 92
        assert not here.hold("", "1", "9")
        assert here.admission.requests.used == 100
    assert here.hold("a", "1", "40")


def test_a_rate_is_one_for_all_and_outlives_a_frontend(table: int) -> None:
    here = Frontend(table, 0)
    with other(table) as there:
        assert [there("ask", "a", "10") for _ in range(3)] == ["True"] * 3
        here.look()
        assert [here.ask("a", "10") for _ in range(4)] == [True] * 3 + [False]
        assert there("ask", "a", "10") == "False"
        assert there("ask", "b", "650") == "True"
        assert not here.ask("b", "1")
    with other(table) as there:
        assert (there("ask", "a", "1"), there("ask", "b", "1")) == ("False", "False")


def test_a_record_that_was_never_finished_is_passed_over(table: int) -> None:
    here = Frontend(table, 0)
    with other(table) as there:
        here.look()
        assert here.ask("a", "100")
        assert there("ask", "a", "550") == "True"
        (place,) = here.group.places("a", here.group.siblings)
        # As one leaves it that is killed between two words.
        here.group.words[place + TOKEN_RATE] += 1
        assert not here.ask("a", "1")
    with other(table) as there:
        assert there("ask", "a", "1") == "False"
