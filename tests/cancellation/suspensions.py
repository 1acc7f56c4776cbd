"""Ends each task of a call at each of its suspensions, and looks whether anything is left behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

import grpc

from tests.cancellation.holdings import Holdings
from tests.cancellation.steps import Place, TaskSteps
from tests.waiting import until

_SETTLE_SECONDS: Final = 60.0
# A connection that was refused lingers for a second.
_SOCKET_SECONDS: Final = 2.0
_ANSWER_SECONDS: Final = 60.0
_LINGER_SECONDS: Final = 60.0
# Of tasks that run the same function in one call, the last ones are as the first ones are.
_MOST_ALIKE: Final = 2
# The runtime's pool of connections grows once, when calls happen to overlap; what is left behind grows each
# time.
_REPEATS: Final = 4
_FIRST_CALLS: Final = 3
# The last of a kind may be kept until the next one comes.
_SPARE_OBJECTS: Final = 3


class Call(Protocol):
    """``ask`` raises unless it is answered as it should be; ``hang_up`` takes its caller away."""

    async def ask(self) -> None: ...

    def hang_up(self, _: object = None) -> None: ...


class LeftBehind(AssertionError):
    """Something is held after a call that was held by none before it, or the next one is not answered."""


async def end_everywhere(steps: TaskSteps, holdings: Holdings, name: str, make: Callable[[], Call]) -> int:
    """End the tasks of the call one by one at each suspension, and hang up there; how many times."""
    before = await holdings.objects()
    for _ in range(_FIRST_CALLS):
        await make().ask()
        await _quiet(steps)
    await holdings.learn()
    first = await holdings.objects()
    ended = 0
    visited: set[tuple[Place, int]] = set()
    while new := await _suspensions(steps, make, visited):
        for place, step in new:
            # The server's own task is cancelled by nobody: a client that hangs up is told to it.
            for act in (asyncio.Task.cancel, None) if place.module.startswith("tessera") else (None,):
                where = f"{name}: {'hung up' if act is None else 'cancelled'} at {step} of {place}"
                for _ in range(_REPEATS):
                    ended += 1
                    await _end_once(steps, holdings, where, make, place, step, act)
                    if not await _more_sockets(holdings):
                        break
                else:
                    raise LeftBehind(f"{where}, {_REPEATS} times: more sockets")
    await _objects_end(holdings, before, first, f"{name}: ended {ended} times")
    return ended


async def _suspensions(
    steps: TaskSteps, make: Callable[[], Call], visited: set[tuple[Place, int]]
) -> list[tuple[Place, int]]:
    """Where a call is suspended that was not visited: it does not always take the same way."""
    steps.begin()
    await make().ask()
    steps.end()
    await _quiet(steps)
    new = [
        (place, step)
        for place, last in steps.seen.items()
        if place.number < _MOST_ALIKE
        for step in range(last + 1)
        if (place, step) not in visited
    ]
    visited.update(new)
    return new


async def _end_once(
    steps: TaskSteps,
    holdings: Holdings,
    where: str,
    make: Callable[[], Call],
    place: Place,
    step: int,
    act: Callable[[asyncio.Task[Any]], object] | None,
) -> None:
    """End one task of a call; everything is given back, and the next call is answered."""
    call = make()
    steps.begin(place, step, act or call.hang_up)
    asked = asyncio.create_task(call.ask())
    await asyncio.wait([asked], timeout=_ANSWER_SECONDS)
    hung = not asked.done()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    steps.end()
    if hung:
        raise LeftBehind(f"{where}: the call got neither an answer nor an error")
    await _given_back(holdings, where)
    try:
        await asyncio.wait_for(make().ask(), _ANSWER_SECONDS)
    except (AssertionError, TimeoutError, grpc.aio.AioRpcError) as error:
        raise LeftBehind(f"{where}: the next call is not answered: {error!r}") from error
    await _quiet(steps)


async def _more_sockets(holdings: Holdings) -> bool:
    """Whether there are more sockets than after the call before, also a while later."""
    with suppress(AssertionError):
        await until(lambda: holdings.more_sockets() <= 0, _SOCKET_SECONDS)
    more = holdings.more_sockets() > 0
    holdings.accept_sockets()
    return more


async def _objects_end(holdings: Holdings, before: Counter[str], first: Counter[str], where: str) -> None:
    """Wait until there are about as many objects as before the calls that were ended.

    A connection that was refused lingers for some seconds, and the last objects of a kind may be kept until
    the next ones come. What grew with calls that went well, from ``before`` to ``first``, is in a cache.
    """

    async def more() -> dict[str, str]:
        now = await holdings.objects()
        return {
            kind: f"{first[kind]}, then {now[kind]}"
            for kind in now
            if now[kind] - first[kind] > _SPARE_OBJECTS and first[kind] - before[kind] < _FIRST_CALLS
        }

    async def gone() -> bool:
        return not await more()

    try:
        await until(gone, _LINGER_SECONDS)
    except AssertionError as error:
        raise LeftBehind(f"{where}: there are more objects: {await more()}") from error


async def _quiet(steps: TaskSteps) -> None:
    """Wait until the tasks of the last call have ended."""
    await until(lambda: not steps.running)


async def _given_back(holdings: Holdings, where: str) -> None:
    changed = holdings.changed()

    def given_back() -> bool:
        nonlocal changed
        # All of it is read when what had changed is as it was.
        changed = holdings.changed(changed) or holdings.changed()
        return not changed

    try:
        await until(given_back, _SETTLE_SECONDS)
    except AssertionError as error:
        left = {"".join(key): counts for key, counts in changed.items()}
        raise LeftBehind(f"{where}: {left}") from error
