"""One piece of queued work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[R]):
    """A result with the milliseconds it waited and ran."""

    value: R
    queue_ms: float
    run_ms: float


@dataclass(slots=True, eq=False)
class Entry(Generic[P, R]):
    """``size`` counts tokens or tiles; ``client`` is who shares with whom, ``priority`` smaller is sooner.

    ``left_queue`` says that it holds no place in the queue any more. ``dropped`` is set by the event loop and
    read by the engine thread. ``abandoned`` is called once, on the event loop, when the future was
    cancelled and the engine will not touch the payload any more: only then may memory that the payload names
    be used for something else.
    """

    payload: P
    size: int
    client: str
    priority: int
    future: asyncio.Future[Outcome[R]]
    enqueued: float
    abandoned: Callable[[], None]
    left_queue: bool = field(default=False)
    dropped: bool = field(default=False)
