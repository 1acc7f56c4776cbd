"""What a run shows of itself: a bar on a terminal, one JSON line a second for programs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

from tessera.local.usage import Usage
from tessera.tasks import KEEPER
from tessera_corpus.run import Progress
from tessera_corpus.sources.counted import Position

_EVERY_SECONDS: Final = 1.0
# Rates are of so many seconds: long enough for pages that take one each, short enough to follow a change.
_WINDOW: Final = 30
# Of the time: from there on something is what the run waits for.
_MOST: Final = 0.7
_HALF: Final = 0.5


class Show(StrEnum):
    """How progress is shown; ``auto`` is a bar on a terminal and JSON lines elsewhere."""

    AUTO = "auto"
    BAR = "bar"
    JSON = "json"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class _Moment:
    """What had been counted at a time, in seconds."""

    seconds: float
    rows: int
    done_before: int
    read: int
    full: float
    writing: float
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is shown. ``rate`` is in items a second; ``limit`` is what the run waits for now."""

    embedded: int
    failed: int
    done_before: int
    rate: float
    eta_seconds: float | None
    cache_hits: float | None
    limit: str
    elapsed_seconds: float

    def as_json(self) -> str:
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({name: round(v, 3) if isinstance(v, float) else v for name, v in values.items()})


class Working(Protocol):
    """Who embeds; ``engines`` is 0 where they are elsewhere, and nothing is known of their work."""

    @property
    def engines(self) -> int: ...

    async def usage(self) -> Usage: ...


class Watch:
    """Makes ``State`` of a run's counters, asked once a second."""

    def __init__(self, progress: Progress, embedder: Working, position: Callable[[], Position]) -> None:
        self._progress = progress
        self._embedder = embedder
        self._position = position
        self._moments: deque[_Moment] = deque(maxlen=_WINDOW)

    async def look(self) -> State:
        usage, progress, position = await self._embedder.usage(), self._progress, self._position()
        now = _Moment(
            progress.seconds,
            progress.embedded + progress.failed,
            progress.done_before,
            position.read,
            progress.full_seconds,
            progress.writing_seconds,
            usage,
        )
        first = self._moments[0] if self._moments else now
        last = self._moments[-1] if self._moments else now
        self._moments.append(now)
        seconds = now.seconds - first.seconds
        read = now.read - first.read
        rate = (now.rows - first.rows) / seconds if seconds else 0.0
        eta = None
        if position.most and rate and (read > 0 or position.read >= position.most):
            # What lies before the place where the run goes on takes no time, so the rates are those of now.
            unread = max(0, position.most - position.read)
            eta = (unread * seconds / read if unread else 0.0) + (progress.taken - now.rows) / rate
        return State(
            embedded=progress.embedded,
            failed=progress.failed,
            done_before=progress.done_before,
            rate=rate,
            eta_seconds=eta,
            cache_hits=usage.cached_images / usage.images if usage.images else None,
            limit=self._limit(last, now),
            elapsed_seconds=now.seconds,
        )

    def _limit(self, before: _Moment, now: _Moment) -> str:
        seconds = now.seconds - before.seconds
        if not seconds or self._progress.starting:
            return "start"
        if now.writing - before.writing > _MOST * seconds:
            return "disk"
        if not self._embedder.engines:
            return "cluster"
        busy = now.usage.engine_seconds - before.usage.engine_seconds
        if busy > _MOST * seconds * self._embedder.engines:
            return "engine"
        if now.full - before.full > _HALF * seconds:
            # Items wait for an engine that does not work: they are being decoded or tokenised, or the
            # service that embeds them does not say.
            return "decode" if now.usage.engine_seconds else "service"
        return "read"


class Display(Protocol):
    def show(self, state: State) -> None: ...

    def close(self) -> None: ...


class _Lines:
    def show(self, state: State) -> None:
        # Whoever read them may have gone.
        with suppress(OSError):
            print(state.as_json(), file=sys.stderr, flush=True)

    def close(self) -> None: ...


class _Bar:
    def __init__(self) -> None:
        from tqdm import tqdm

        self._bar: Any = tqdm(unit=" items", smoothing=0.0, bar_format="{desc}")

    def show(self, state: State) -> None:
        parts = [f"{state.embedded + state.done_before:,} done", f"{state.rate:,.1f}/s"]
        if state.eta_seconds is not None:
            parts.append(f"{_clock(state.eta_seconds)} left")
        if state.failed:
            parts.append(f"{state.failed:,} failed")
        if state.cache_hits:
            parts.append(f"cache {state.cache_hits:.0%}")
        self._bar.set_description_str("  ".join([*parts, f"limit: {state.limit}"]))

    def close(self) -> None:
        self._bar.close()


class _Nothing:
    def show(self, state: State) -> None: ...

    def close(self) -> None: ...


def display(show: Show) -> Display:
    if show is Show.AUTO:
        show = Show.BAR if sys.stderr.isatty() else Show.JSON
    kinds: dict[Show, Callable[[], Display]] = {Show.BAR: _Bar, Show.JSON: _Lines, Show.NONE: _Nothing}
    return kinds[show]()


def keep_showing(watch: Watch, shown: Display) -> asyncio.Task[None]:
    """Show the state once a second until the task is cancelled."""

    async def show() -> None:
        shown.show(await watch.look())

    return KEEPER.start("progress", show, every=_EVERY_SECONDS)


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
