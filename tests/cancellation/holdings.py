"""What the package holds at a moment: counts in its objects, tasks, descriptors."""

from __future__ import annotations

import asyncio
import gc
import os
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from tessera.cache import BoundedLru
from tessera.frontend.http.middleware import AnswerCounts
from tessera.logs import Line
from tessera.worker.access_log import AccessLog

# Bounded by themselves: what a cache or a ring of past calls holds is given back by nobody.
# Names of a metric's labels are kept for good; lines wait to be written together.
_SKIPPED: Final = (BoundedLru, Line, AnswerCounts, AccessLog)
# When an instance answered last; it is forgotten with one that is set aside.
_TIMES: Final = ("_last_answer",)
_OBJECTS: Final = "objects of"
_COUNTED: Final = (int, list, dict, set, frozenset, deque, OrderedDict, bytes)


class Holdings:
    """Compares what is held now with what was held at first, in every object of the package that lives.

    ``learn`` is called after calls that went well: what they change counts what has been done, such as the
    number of the next call, and is compared no more.
    """

    def __init__(self) -> None:
        self._objects = list(_living())
        self._moving: set[str] = set()
        self._first = self.read()

    async def learn(self) -> None:
        now = self.read()
        # A pulse that is under way is none of a call's.
        while now.get("tasks of _Line._travel"):
            await asyncio.sleep(0.01)
            now = self.read()
        self._moving |= {key for key in self._first.keys() | now.keys() if self._first.get(key) != now.get(key)}
        self._first = now

    def changed(self) -> dict[str, tuple[int, int]]:
        """What is different, with its value at first and now; objects alone are looked at by themselves."""
        return {
            key: (was, now)
            for key, (was, now) in self._differences().items()
            # Of connections that were spare there may be fewer.
            if not key.startswith(_OBJECTS) and not (now < was and key.startswith("descriptors of"))
        }

    def more_objects(self) -> dict[str, int]:
        """How many more objects there are than at first, by kind."""
        return {
            key: now - was
            for key, (was, now) in self._differences().items()
            if key.startswith(_OBJECTS) and now > was
        }

    def _differences(self) -> dict[str, tuple[int, int]]:
        first, now = self._first, self.read()
        return {
            key: (was, held)
            for key in first.keys() | now.keys()
            if key not in self._moving and (was := first.get(key, 0)) != (held := now.get(key, 0))
        }

    @property
    def compared(self) -> int:
        """Counts that are compared."""
        return len(self._first.keys() - self._moving)

    def read(self) -> dict[str, int]:
        gc.collect()
        read: dict[str, int] = {}
        for number, held in enumerate(self._objects):
            name = f"{type(held).__module__.removeprefix('tessera.')}.{type(held).__qualname__}"
            for attribute, value in _attributes(held):
                if attribute in _TIMES or isinstance(value, bool) or not isinstance(value, _COUNTED):
                    continue
                read[f"{name}#{number}.{attribute}"] = value if isinstance(value, int) else len(value)
        for kind, count in Counter(f"objects of {type(held).__qualname__}" for held in _living()).items():
            read[kind] = count
        for name, count in Counter(_coroutine(task) for task in asyncio.all_tasks()).items():
            read[f"tasks of {name}"] = count
        for name, count in Counter(_descriptors()).items():
            read[f"descriptors of {name}"] = count
        return read


def _living() -> Iterator[Any]:
    for held in gc.get_objects():
        kind = type(held)
        if getattr(kind, "__module__", "").__class__ is str and kind.__module__.startswith("tessera."):
            if not isinstance(held, (*_SKIPPED, type, BaseException)):
                yield held


def _attributes(held: Any) -> Iterator[tuple[str, Any]]:
    values: Mapping[str, Any] = getattr(held, "__dict__", {})
    yield from values.items()
    names: Iterable[str] = (
        name for kind in type(held).__mro__ for name in _slots(kind) if name not in ("__dict__", "__weakref__")
    )
    for name in names:
        if hasattr(held, name):
            yield name, getattr(held, name)


def _slots(kind: type) -> Iterable[str]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _coroutine(task: asyncio.Task[Any]) -> str:
    work = task.get_coro()
    work = getattr(work, "_work", work)
    return getattr(work, "__qualname__", repr(work))


def _descriptors() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        yield re.sub(r"\d+", "", target)
