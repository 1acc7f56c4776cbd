"""A launched batch, by an event that passes when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tessera.launched import Launched


@dataclass
class Passes:
    passed: bool = False
    waits: list[str] = field(default_factory=list)

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waits.append("event")
        self.passed = True


def test_a_result_is_made_once_the_event_has_passed() -> None:
    event = Passes()

    def finish() -> int:
        event.waits.append("finish")
        return 7

    launched = Launched.after(event, finish, keep=()).map(lambda value: value + 1).map(str)
    assert not launched.done() and event.waits == []
    assert launched.result() == "8"
    assert launched.done() and event.waits == ["event", "finish"]


def test_errors_are_translated_whatever_raised_them() -> None:
    class Breaks(Passes):
        def synchronize(self) -> None:
            raise RuntimeError("late")

    launched = Launched.after(Breaks(), lambda: 0, keep=()).map_error(lambda error: ValueError(str(error)))
    with pytest.raises(ValueError, match="late") as found:
        launched.map(str).result()
    assert isinstance(found.value.__cause__, RuntimeError)
    assert Launched.of(3).map_error(lambda error: error).result() == 3


def test_several_batches_are_done_when_the_last_one_is() -> None:
    first, second = Passes(), Passes()
    both = Launched.every(
        [
            Launched.after(first, lambda: "first", keep=()),
            Launched.after(second, lambda: "second", keep=()),
        ]
    )
    assert not both.done()
    first.passed = True
    assert not both.done()
    assert both.result() == ["first", "second"] and both.done()


class Raises(Passes):
    """An event as CUDA's behind a device-side assert: it raises from the third query on."""

    queries = 0

    def query(self) -> bool:
        self.queries += 1
        if self.queries > 2:
            raise RuntimeError("asserted")
        return False


def test_an_error_of_asking_is_raised_by_the_result_and_translated() -> None:
    made: list[object] = []
    batch = Launched.after(Raises(), lambda: made.append("result"), keep=())
    both = Launched.every([batch, Launched.of(None)])
    # Batches are asked once when they are made one.
    layered = both.map_error(lambda error: ValueError(str(error))).map(len)
    assert not layered.done()
    assert layered.done() and layered.done()
    with pytest.raises(ValueError, match="asserted"):
        layered.result()
    assert made == [], "the result of a batch that failed is not made"


def test_an_error_of_telling_is_one_of_the_batch() -> None:
    def tell(call: Callable[[], None]) -> None:
        raise RuntimeError("nobody to tell")

    batch = Launched(lambda: 3, done=lambda: False, tell=tell)
    layered = batch.map_error(lambda error: ValueError(str(error))).map(str)
    assert layered.tells and not layered.done()
    layered.when_done(lambda: None)
    assert layered.done()
    with pytest.raises(ValueError, match="nobody to tell"):
        layered.result()
