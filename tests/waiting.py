"""Waiting for something to come about: for so long at most, with pauses, and saying what did not.

``until`` is for coroutines, ``wait_until`` for all else. Wait on what takes nothing: a request that takes a
place, or a part of a rate, may keep what it waits for from coming about.
"""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

T = TypeVar("T")

# On two processors a process took 40 s to start beside eight others, and 70 beside thirty.
SECONDS = 180.0
# Pauses are a share of the time that has passed: what is waited for needs the processor, and may end soon.
_SHARE, _SHORTEST_PAUSE, _LONGEST_PAUSE = 1 / 20, 0.001, 0.25
# Tasks that call each other in a row take a few turns for each step.
_TURNS = 100

Errors = type[Exception] | tuple[type[Exception], ...]
Process = subprocess.Popen[Any]


def wait_until(
    condition: Callable[[], T],
    seconds: float = SECONDS,
    *,
    despite: Errors = (),
    process: Process | None = None,
    said: Callable[[], object] | None = None,
) -> T:
    """Ask ``condition`` again and again, and return its first true value.

    ``despite`` are errors that are as good as a false value. ``process`` must not end before. ``said`` tells
    more of a failure, such as a log. Raises AssertionError.
    """
    wait = _Wait(condition, seconds, process, said)
    while True:
        try:
            if last := condition():
                return last
        except despite as error:
            last = cast(T, error)
        time.sleep(wait.pause(last))


async def until(
    condition: Callable[[], T | Awaitable[T]],
    seconds: float = SECONDS,
    *,
    despite: Errors = (),
    process: Process | None = None,
    said: Callable[[], object] | None = None,
) -> T:
    """As ``wait_until``; ``condition`` may be a coroutine function, and the loop runs on."""
    wait = _Wait(condition, seconds, process, said)
    while True:
        try:
            found = condition()
            if last := await found if inspect.isawaitable(found) else found:
                return cast(T, last)
        except despite as error:
            last = error
        await asyncio.sleep(wait.pause(last))


def wait_for_line(
    log: Path, text: str, seconds: float = SECONDS, *, count: int = 1, process: Process | None = None
) -> None:
    """Wait until a log has a text so often."""
    wait_until(
        lambda: log.exists() and log.read_text(errors="replace").count(text) >= count,
        seconds,
        process=process,
        said=lambda: (
            f"{text!r} is not in {log}: {log.read_text(errors='replace')[-8000:] if log.exists() else ''}"
        ),
    )


async def all_turns() -> None:
    """Let tasks of this loop run for as far as they come without waiting.

    A short sleep may be over after one turn: on a busy machine this process may not run meanwhile.
    """
    for _ in range(_TURNS):
        await asyncio.sleep(0)


class _Wait:
    """When to look again, and for how long."""

    def __init__(
        self,
        condition: Callable[[], object],
        seconds: float,
        process: Process | None,
        said: Callable[[], object] | None,
    ) -> None:
        self._condition = condition
        self._seconds = seconds
        self._process = process
        self._said = said
        self._began = time.monotonic()
        self._why = ""

    def pause(self, last: object) -> float:
        """How long to pause before the next look; an error if this look was the last one.

        There is one more look after the end of the time, and of the process: it may have come about just
        before.
        """
        if self._why:
            said = "" if self._said is None else f"\n{self._said()}"
            raise AssertionError(f"{self._why}: {_source(self._condition)}; the last value is {last!r}{said}")
        waited = time.monotonic() - self._began
        status = None if self._process is None else self._process.poll()
        if status is not None:
            self._why = f"the process ended with status {status} before"
        elif waited > self._seconds:
            self._why = f"not within {self._seconds:g} s"
        return 0.0 if self._why else min(max(_SHARE * waited, _SHORTEST_PAUSE), _LONGEST_PAUSE)


def _source(condition: Callable[[], object]) -> str:
    """The lines of a condition, which say what is waited for."""
    try:
        return " ".join(inspect.getsource(condition).split())
    except (OSError, TypeError):
        return repr(condition)
