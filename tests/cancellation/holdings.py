"""What the package holds at a moment: counts in its objects, tasks, descriptors."""

from __future__ import annotations

import asyncio
import gc
import os
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any, Final

from tessera.cache import BoundedLru
from tessera.logs import Line, RequestLine
from tessera.rpc.client import _Channel
from tessera_kserve.statistics import Statistics
from tests.waiting import until

# Bounded by themselves: what a cache or a ring of past calls holds is given back by nobody.
# Names of a metric's labels are kept for good; lines wait to be written together.
_SKIPPED: Final = (BoundedLru, Line, RequestLine, Statistics)
# The number of the next call; what a connection to an image's host may yet read in its round.
_GOING_ON: Final = ("_numbers", "_left")
# The runtime opens and closes connections as calls come and are ended: they are compared after calls that
# went well, when there are as many as it wants.
_TASKS: Final = "tasks of "
_DESCRIPTORS: Final = "descriptors of "
_SOCKETS: Final = (_DESCRIPTORS, "socket:[]")
_COUNTED: Final = (int, list, dict, set, frozenset, deque, OrderedDict, bytes)
# What holds a count, and its name there.
_Key = tuple[str, str]


class Holdings:
    """Compares what is held now with what was held at first, in every object of the package that lives.

    ``learn`` is called after calls that went well: what they change counts what has been done, such as hits
    of a cache, and is compared no more.
    """

    def __init__(self) -> None:
        gc.collect()
        self._objects = [(_name(held, number), held) for number, held in enumerate(_living())]
        self._caches = list(_caches())
        # What lives now is looked at no more: a collection takes a fifth of the time.
        gc.freeze()
        self._moving: set[_Key] = set()
        self._first = self._read()

    async def learn(self) -> None:

        def read() -> dict[_Key, int] | None:
            now = self._read()
            return None if now.get((_TASKS, _Channel._travel.__qualname__)) else now

        # A pulse that is under way is none of a call's.
        now = await until(read)
        assert now is not None
        keys = self._first.keys() | now.keys()
        self._moving |= {key for key in keys if self._first.get(key) != now.get(key)}
        self._first = now

    def changed(self, among: Collection[_Key] | None = None) -> dict[_Key, tuple[int, int]]:
        """Counts that are different, with their value at first and now, but for sockets; all, or some."""
        first = self._first if among is None else {key: self._first.get(key, 0) for key in among}
        now = self._read(among)
        keys = [key for key, held in now.items() if self._first.get(key, 0) != held]
        keys += [key for key in first.keys() - now.keys() if first[key]]
        return {
            key: (self._first.get(key, 0), now.get(key, 0))
            for key in keys
            if key != _SOCKETS and key not in self._moving
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
        return sum((_DESCRIPTORS, target) == _SOCKETS for target in _descriptors())

    @property
    def compared(self) -> int:
        """Counts that are compared."""
        return len(self._first.keys() - self._moving)

    def _read(self, among: Collection[_Key] | None = None) -> dict[_Key, int]:
        """Counts of all that is held, or of what holds ``among``."""
        holders = None if among is None else {name for name, _ in among}
        # Thousands of attributes after each call: most of what the tests computed.
        read: dict[_Key, int] = {}
        for name, held in self._objects:
            if holders is not None and name not in holders:
                continue
            for attribute, value in _attributes(held):
                if (count := _counts(type(value))) is not None and attribute not in _GOING_ON:
                    read[name, attribute] = count(value)
        if holders is None or _TASKS in holders:
            for task, number in Counter(_coroutine(task) for task in asyncio.all_tasks()).items():
                read[_TASKS, task] = number
        if holders is None or _DESCRIPTORS in holders:
            for target, number in Counter(_descriptors()).items():
                read[_DESCRIPTORS, target] = number
        return read


@cache
def _counts(kind: type) -> Callable[[Any], int] | None:
    """What makes a count of a value of this type; None where it has none."""
    if issubclass(kind, bool) or not issubclass(kind, _COUNTED):
        return None
    return int if issubclass(kind, int) else len


def _name(held: object, number: int) -> str:
    return f"{type(held).__module__.removeprefix('tessera.')}.{type(held).__qualname__}#{number}."


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
    for name in _slots(type(held)):
        yield name, getattr(held, name, None)


@cache
def _slots(kind: type) -> list[str]:
    """The names of its slots and of those that it inherits."""
    found: list[str] = []
    for one in kind.__mro__:
        slots = one.__dict__.get("__slots__", ())
        found += (slots,) if isinstance(slots, str) else slots
    return [name for name in found if name not in ("__dict__", "__weakref__")]


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
