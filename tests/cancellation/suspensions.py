"""Ends each task of a call at each of its suspensions, and looks whether anything is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import grpc

from tests.cancellation.holdings import Holdings
from tests.cancellation.steps import Place, TaskSteps

_SETTLE_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 10.0
# Of tasks that run the same function in one call, the last ones are as the first ones are.
_MOST_ALIKE: Final = 2


class Call(Protocol):
    """``ask`` raises unless it is answered as it should be; ``hang_up`` takes its caller away."""

    async def ask(self) -> None: ...

    def hang_up(self, _: object = None) -> None: ...


class LeftBehind(AssertionError):
    """Something is held after a call that was held by none before it, or the next one is not answered."""


async def end_everywhere(steps: TaskSteps, name: str, make: Callable[[], Call]) -> int:
    """End the tasks of the call one by one at each suspension, and hang up there; how many times."""
    for _ in range(3):
        await make().ask()
    holdings = Holdings()
    for _ in range(3):
        await _quiet(steps)
        await make().ask()
    await _quiet(steps)
    await holdings.learn()
    ended = 0
    visited: set[tuple[Place, int]] = set()
    while True:
        # A call does not always take the same way: what another one shows is visited as well.
        steps.begin()
        await make().ask()
        steps.end()
        await _quiet(steps)
        new = [
            (place, step)
            for place, last in steps.seen.items()
            if place.number < _MOST_ALIKE
            for step in range(last)
            if (place, step) not in visited
        ]
        if not new:
            return ended
        for place, step in new:
            visited.add((place, step))
            # The server's own task is cancelled by nobody: a client that hangs up is told to it.
            for act in (asyncio.Task.cancel, None) if place.module.startswith("tessera") else (None,):
                where = f"{name}: {'hung up' if act is None else 'cancelled'} at {step} of {place}"
                more = await _end_once(steps, holdings, where, make, place, step, act)
                if more:
                    # The last object of a kind may be kept until the next one comes; what grows is leaked.
                    again = await _end_once(steps, holdings, where, make, place, step, act)
                    grown = {key: count for key, count in again.items() if count > more.get(key, 0)}
                    if grown:
                        raise LeftBehind(f"{where}: more of {grown} each time")
                ended += 1


async def _end_once(
    steps: TaskSteps,
    holdings: Holdings,
    where: str,
    make: Callable[[], Call],
    place: Place,
    step: int,
    act: Callable[[asyncio.Task[Any]], object] | None,
) -> dict[str, int]:
    """End one task of a call and make another call; how many more objects there are afterwards, by kind."""
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
    return holdings.more_objects()


async def _quiet(steps: TaskSteps) -> None:
    """Wait until the tasks of the last call have ended."""
    async with asyncio.timeout(_SETTLE_SECONDS):
        while steps.running:
            await asyncio.sleep(0.001)


async def _given_back(holdings: Holdings, where: str) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + _SETTLE_SECONDS
    while changed := holdings.changed():
        if loop.time() > until:
            raise LeftBehind(f"{where}: {changed}")
        await asyncio.sleep(0.01)
