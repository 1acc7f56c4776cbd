"""A background loop whose inner call fails, and what is expected of it then."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tessera.tasks import KEEPER
from tests.waiting import until


class Switch:
    """Raises while it is on; counts how often."""

    def __init__(self) -> None:
        self.on = False
        self.raised = 0

    def check(self) -> None:
        if self.on:
            self.raised += 1
            raise RuntimeError("odd")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short pauses after failures; what was counted before does not count."""
    monkeypatch.setattr(KEEPER, "first_pause", 0.001)
    monkeypatch.setattr(KEEPER, "longest_pause", 0.01)
    KEEPER.failures.clear()
    yield
    assert KEEPER.trouble is None


async def fails_and_goes_on(
    name: str, switch: Switch, goes_on: Callable[[], bool], caplog: pytest.LogCaptureFixture
) -> None:
    """A loop survives one error, and is trouble for as long as there are more."""
    switch.on = True
    await until(lambda: KEEPER.trouble is not None)
    assert KEEPER.trouble is not None and name in KEEPER.trouble
    assert KEEPER.failures[name] >= KEEPER.MOST_FAILURES and "RuntimeError: odd" in caplog.text
    switch.on = False
    await until(lambda: KEEPER.trouble is None)
    await until(goes_on)
