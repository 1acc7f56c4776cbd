"""A launched batch, by an event that passes when the test says so."""

from __future__ import annotations

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
