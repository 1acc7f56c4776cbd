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
from tessera.logs import Line, RequestLine
from tessera.rpc.client import _Channel
from tessera_kserve.statistics import Statistics

# Bounded by themselves: what a cache or a ring of past calls holds is given back by nobody.
# Names of a metric's labels are kept for good; lines wait to be written together.
_SKIPPED: Final = (BoundedLru, Line, RequestLine, AnswerCounts, Statistics)
# When an instance answered last, which is forgotten with one that is set aside; the number of the next call.
_GOING_ON: Final = ("_numbers",)
# The runtime opens and closes connections as calls come and are ended: they are compared after calls that
# went well, when there are as many as it wants.
_SOCKETS: Final = "descriptors of socket:[]"
_COUNTED: Final = (int, list, dict, set, frozenset, deque, OrderedDict, bytes)


class Holdings:
    """Compares what is held now with what was held at first, in every object of the package that lives.

    ``learn`` is called after calls that went well: what they change counts what has been done, such as hits
    of a cache, and is compared no more.
    """

    def __init__(self) -> None:
        gc.collect()
        self._objects = list(_living())
        self._caches = list(_caches())
        # What lives now is looked at no more: a collection takes a fifth of the time.
        gc.freeze()
        self._moving: set[str] = set()
        self._first = self._read()

    async def learn(self) -> None:
        now = self._read()
        # A pulse that is under way is none of a call's.
        while now.get(f"tasks of {_Channel._travel.__qualname__}"):
            await asyncio.sleep(0.01)
            now = self._read()
        keys = self._first.keys() | now.keys()
        self._moving |= {key for key in keys if self._first.get(key) != now.get(key)}
        self._first = now

    def changed(self) -> dict[str, tuple[int, int]]:
        """Counts that are different, with their value at first and now, but for sockets."""
        first, now = self._first, self._read()
        return {
            key: (was, held)
            for key in first.keys() | now.keys()
            if key != _SOCKETS
            and key not in self._moving
            and (was := first.get(key, 0)) != (held := now.get(key, 0))
        }

    async def objects(self) -> Counter[str]:
        """How many objects of the package there are that were not there at first, by kind, beside the values
        of caches."""
        gc.collect()
        # Generators that the collector found are closed by tasks.
        await asyncio.sleep(0.02)
        gc.collect()
        caches = [*self._caches, *_caches()]
        cached = {id(value) for cache in caches for value in cache._values.values()}
        return Counter(type(held).__qualname__ for held in _living() if id(held) not in cached)

    def more_sockets(self) -> int:
        """How many more sockets there are than when they were last accepted, or at first."""
        return self._sockets() - self._first[_SOCKETS]

    def accept_sockets(self) -> None:
        self._first[_SOCKETS] = self._sockets()

    def _sockets(self) -> int:
        return sum(f"descriptors of {target}" == _SOCKETS for target in _descriptors())

    @property
    def compared(self) -> int:
        """Counts that are compared."""
        return len(self._first.keys() - self._moving)

    def _read(self) -> dict[str, int]:
        read: dict[str, int] = {}
        for number, held in enumerate(self._objects):
            name = f"{type(held).__module__.removeprefix('tessera.')}.{type(held).__qualname__}"
            for attribute, value in _attributes(held):
                if attribute in _GOING_ON or isinstance(value, bool) or not isinstance(value, _COUNTED):
                    continue
                read[f"{name}#{number}.{attribute}"] = value if isinstance(value, int) else len(value)
        for task, count in Counter(_coroutine(task) for task in asyncio.all_tasks()).items():
            read[f"tasks of {task}"] = count
        for target, count in Counter(_descriptors()).items():
            read[f"descriptors of {target}"] = count
        return read


def _caches() -> Iterator[BoundedLru[Any, Any]]:
    for held in gc.get_objects():
        if issubclass(type(held), BoundedLru):
            yield held


def _living() -> Iterator[Any]:
    for held in gc.get_objects():
        module = getattr(type(held), "__module__", "")
        ours = isinstance(module, str) and module.startswith(("tessera.", "tessera_apis.", "tessera_kserve."))
        if ours and not isinstance(held, (*_SKIPPED, type, BaseException)):
            yield held


def _attributes(held: Any) -> Iterator[tuple[str, Any]]:
    values: Mapping[str, Any] = getattr(held, "__dict__", {})
    yield from values.items()
    for name in (name for kind in type(held).__mro__ for name in _slots(kind)):
        if name not in ("__dict__", "__weakref__") and hasattr(held, name):
            yield name, getattr(held, name)


def _slots(kind: type) -> Iterable[str]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _coroutine(task: asyncio.Task[Any]) -> str:
    work = task.get_coro()
    work = getattr(work, "work", work)
    return getattr(work, "__qualname__", repr(work))


def _descriptors() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        yield re.sub(r"\d+", "", target)
