"""A task factory that ends one task of the package at one of its suspensions, and notes all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import uvicorn

import tessera
import tessera_apis
import tessera_kserve

_OURS: Final = tuple(
    str(Path(package.__file__).parent) for package in (tessera, tessera_apis, tessera_kserve, uvicorn)
)


@dataclass(frozen=True, slots=True)
class Place:
    """One task of a call: the function that it runs, and the how manyth of its kind it is in that call."""

    module: str
    function: str
    number: int


class Stepped(Coroutine[Any, Any, Any]):
    """A coroutine that reports each suspension, as ``asyncio.Task`` runs it.

    Suspension 0 is before the first step, which the factory reports.
    """

    def __init__(self, work: Coroutine[Any, Any, Any], suspended: Callable[[int], None]) -> None:
        self.work = work
        self._suspended = suspended
        self._steps = 0

    def send(self, value: Any) -> Any:
        result = self.work.send(value)
        self._report()
        return result

    def throw(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
        /,
    ) -> Any:
        # The three arguments are deprecated where the error itself is given.
        result = self.work.throw(kind if isinstance(kind, BaseException) else kind(value))
        self._report()
        return result

    def close(self) -> None:
        self.work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise TypeError("only a task runs it")

    def _report(self) -> None:
        self._steps += 1
        self._suspended(self._steps)


class TaskSteps:
    """The factory: watches the tasks that are made while ``watching`` is set, and acts at one suspension.

    ``visited`` counts the suspensions at which something was ended, by module and by function.
    """

    def __init__(self) -> None:
        self.watching = False
        self.seen: dict[Place, int] = {}
        self.visited: Counter[str] = Counter()
        self.running: set[asyncio.Task[Any]] = set()
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._place: Place | None = None
        self._step = -1
        self._act: Callable[[asyncio.Task[Any]], object] = asyncio.Task.cancel

    def begin(
        self,
        place: Place | None = None,
        step: int = -1,
        act: Callable[[asyncio.Task[Any]], object] = asyncio.Task.cancel,
    ) -> None:
        """Watch a new call; ``act`` upon the task of ``place`` at the suspension ``step``."""
        self.watching = True
        self.seen = {}
        self._numbers.clear()
        self._place, self._step, self._act = place, step, act

    def end(self) -> None:
        self.watching = False
        self._place = None

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Any, /, **options: Any) -> asyncio.Task[Any]:
        code = getattr(work, "cr_code", None)
        if not self.watching or code is None or not code.co_filename.startswith(_OURS):
            return asyncio.Task(work, loop=loop, **options)
        module = _module(code.co_filename)
        function = getattr(work, "__qualname__", code.co_name)
        place = Place(module, function, self._numbers[module, function])
        self._numbers[module, function] += 1
        self.seen[place] = 0

        def suspended(step: int) -> None:
            self.seen[place] = step
            self._reach(task, place, step)

        task: asyncio.Task[Any] = asyncio.Task(Stepped(work, suspended), loop=loop, **options)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        self._reach(task, place, 0)
        return task

    def _reach(self, task: asyncio.Task[Any], place: Place, step: int) -> None:
        if place == self._place and step == self._step:
            self._place = None
            self.visited.update(_suspended_in(task) or {place.module})
            self._act(task)


def _suspended_in(task: asyncio.Task[Any]) -> set[str]:
    """The modules and functions of the package that a task is suspended in; none before its first step."""
    stepped = task.get_coro()
    awaited: Any = stepped.work if isinstance(stepped, Stepped) else None
    names: set[str] = set()
    while awaited is not None:
        code = getattr(awaited, "cr_code", None)
        if code is not None and code.co_filename.startswith(_OURS) and awaited.cr_frame.f_lasti >= 0:
            names |= {_module(code.co_filename), code.co_qualname}
        awaited = getattr(awaited, "cr_await", None)
    return names


def _module(file: str) -> str:
    """The folder of the package that a file is in, two levels deep at most."""
    for root in _OURS:
        if file.startswith(root):
            parts = Path(file).relative_to(Path(root).parent).with_suffix("").parts
            return ".".join(parts[: 3 if len(parts) > 3 else 2])
    raise AssertionError(file)
