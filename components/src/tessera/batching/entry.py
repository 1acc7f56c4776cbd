"""One piece of queued work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tessera.tracing import Reference

P = TypeVar("P")
R = TypeVar("R")

_MOST_NAMED = 16


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
    be used for something else. ``request_id`` is for the log, empty where none is known; ``asked`` is the
    span that the work is for, where there is one that is kept.
    """

    payload: P
    size: int
    client: str
    priority: int
    future: asyncio.Future[Outcome[R]]
    enqueued: float
    abandoned: Callable[[], None]
    request_id: str = ""
    left_queue: bool = field(default=False)
    dropped: bool = field(default=False)
    asked: Reference | None = field(default=None)


def requests_of(entries: Sequence[Entry[P, R]]) -> dict[str, dict[str, str]]:
    """What a log record about them says of their requests (``extra``)."""
    ids = list(dict.fromkeys(entry.request_id for entry in entries if entry.request_id))
    if len(ids) == 1:
        return {"fields": {"request_id": ids[0]}}
    return {"fields": {"request_ids": ",".join(ids[:_MOST_NAMED])}} if ids else {}
