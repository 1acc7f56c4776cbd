"""Keeps the processes of a service running, and ends them in their order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import kill
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGTERM
from signal import Signals as Number
from typing import Final, NoReturn

from tessera.launch.children import Child, Signals, collect, spawn
from tessera.launch.report import Report

_FIRST_DELAY: Final = 1
_LONGEST_DELAY: Final = 30
# Of one that ran for so long the next end has nothing to do with the ones before.
_SETTLED_SECONDS: Final = 60.0
# Frontends take nothing new and finish what they have, for which they need the workers, and embed workers the
# encode workers.
_ORDER: Final = (("frontend",), ("agg", "embed"), ("encode",))


class Hopeless(Exception):
    """A child ended with a status with which it would end again."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a process of a child."""

    child: Child
    pid: int
    status: int

    def __str__(self) -> str:
        return f"{self.child.name} (pid {self.pid}) ended with status {self.status}"


class Supervisor:
    """``children`` are in the order in which they were started first.

    Each inherits copies of ``inherited`` behind its own descriptors.
    What has not ended ``stop_seconds`` after it was told to is killed; None: never.
    """

    def __init__(
        self,
        signals: Signals,
        report: Report,
        stop_seconds: float | None,
        *,
        hopeless: frozenset[int] = frozenset(),
    ) -> None:
        self.children: list[Child] = []
        self.inherited: list[int] = []
        self._signals = signals
        self._report = report
        self._stop_seconds = stop_seconds
        self._hopeless = hopeless
        # Processes beside the service, which are not started again, with the status of what has ended.
        self._others: dict[int, int | None] = {}

    def start(
        self,
        name: str,
        role: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
    ) -> Child:
        """Start a process that is started again whenever it ends. Raises ``OSError``.

        It inherits copies of ``descriptors``, as ``children.spawn`` says.
        """
        child = Child(name, role, command, environment, descriptors)
        self.children.append(child)
        self._start(child)
        return child

    def start_other(
        self, command: Sequence[str], environment: Mapping[str, str], output: Path, *, errors: bool = True
    ) -> int:
        """Start a process that ends with the service, after all others; its id. Raises ``OSError``.

        ``output`` is for what it writes, with its ``errors`` if these are to go there, too.
        """
        pid = spawn(command, environment, output=output, errors=errors)
        self._others[pid] = None
        return pid

    def status_of(self, pid: int) -> int | None:
        """What such a process ended with, None while it runs; asked for no more once it has ended."""
        self._collect_others()
        status = self._others[pid]
        if status is not None:
            del self._others[pid]
        return status

    def leave(self, children: Iterable[Child]) -> None:
        """Tell these to end; none is started again, and what has ended is no child any more."""
        due = None if self._stop_seconds is None else time.monotonic() + self._stop_seconds
        for child in children:
            child.leaving, child.due = True, due
            if child.pid is not None:
                # What is frozen cannot obey.
                _signal(child.pid, SIGCONT)
                _signal(child.pid, SIGTERM)
        self._forget()

    def tell(self, role: str, number: Number) -> None:
        """Send a signal to all children of a role."""
        for child in self.children:
            if child.role == role and child.pid is not None:
                _signal(child.pid, number)

    def wait_until(self, done: Callable[[], bool]) -> Ended | None:
        """Wait until something is done, or a child ends before. Raises ``Told``.

        What makes it done must send SIGCHLD to this process.
        """
        while not done():
            self._signals.wait(None)
            for ended in self._ended():
                if not done():
                    return ended
                self._replace(ended)
        return None

    def supervise(self, beside: Callable[[], float | None] = lambda: None) -> NoReturn:
        """Start every child that ends again, each time a little later if it keeps ending at once.

        No child waits for another one's pause. ``beside`` is called at each turn, and says in how many
        seconds it wants to be called again at the latest. Raises ``Told``, and ``Hopeless`` for such a
        status.
        """
        while True:
            now = time.monotonic()
            for child in self.children:
                if child.due is not None and child.due <= now:
                    if child.leaving:
                        self._kill(child)
                    else:
                        self._start_again(child)
            # One signal may stand for several children.
            for ended in self._ended():
                self._replace(ended)
            seconds = beside()
            due = [child.due - time.monotonic() for child in self.children if child.due is not None]
            waits = due if seconds is None else [*due, seconds]
            self._signals.wait(min(waits) if waits else None)

    def stop(self) -> None:
        """End every child and wait for it, in their order; none is started again.

        No signal is listened to meanwhile: a second Ctrl-C leaves nothing behind.
        """
        # A frozen child cannot obey, nor finish what others wait for.
        for pid in self._pids():
            _signal(pid, SIGCONT)
        for roles in _ORDER:
            self._end({child.pid for child in self.children if child.role in roles and child.pid is not None})
        self._end(self._running_others())

    def _start(self, child: Child) -> None:
        child.due = None
        child.started = time.monotonic()
        descriptors = [*child.descriptors, *self.inherited]
        child.pid = spawn(child.command, child.environment, descriptors=descriptors)

    def _start_again(self, child: Child) -> None:
        child.delay = min(2 * child.delay, _LONGEST_DELAY)
        try:
            self._start(child)
        except OSError as error:
            child.due = child.started + child.delay
            self._report.complain(f"{child.name}: {error}; starting it again in {child.delay} s")

    def _kill(self, child: Child) -> None:
        self._report.warn(f"killing {child.name}, which has not ended after {self._stop_seconds} s")
        child.due = None
        if child.pid is not None:
            _signal(child.pid, SIGKILL)

    def _forget(self) -> None:
        """Leave out what was told to leave and has ended."""
        self.children = [child for child in self.children if not child.leaving or child.pid is not None]

    def _collect_others(self) -> None:
        for pid, status in self._others.items():
            if status is None:
                self._others[pid] = collect(pid)

    def _ended(self) -> list[Ended]:
        """Children that have ended since the last call; from now on their ids may be others'."""
        found = []
        for child in self.children:
            if child.pid is not None and (status := collect(child.pid)) is not None:
                found.append(Ended(child, child.pid, status))
                child.pid, child.status = None, status
        self._collect_others()
        return found

    def _replace(self, ended: Ended) -> None:
        """Say that a child has ended, and when it will be started again."""
        child, now = ended.child, time.monotonic()
        if ended.status in self._hopeless:
            raise Hopeless(ended.status)
        if child.leaving:
            self._forget()
            return
        if now - child.started > _SETTLED_SECONDS:
            child.delay = _FIRST_DELAY
        # One that was told to end, for a rolling restart, ends with 0.
        tell = self._report.complain if ended.status else self._report.say
        tell(f"{ended}; starting it again in {child.delay} s")
        child.due = now + child.delay

    def _pids(self) -> set[int]:
        return {child.pid for child in self.children if child.pid is not None} | self._running_others()

    def _running_others(self) -> set[int]:
        return {pid for pid, status in self._others.items() if status is None}

    def _end(self, pids: set[int]) -> None:
        """Ask these children to end, all at once, and wait until they have."""
        for pid in pids:
            _signal(pid, SIGTERM)
        deadline = None if self._stop_seconds is None else time.monotonic() + self._stop_seconds
        while True:
            # Whichever it is: what has ended is not signalled later on.
            self._ended()
            pids &= self._pids()
            if not pids:
                return
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                self._report.warn(f"killing what has not ended after {self._stop_seconds} s")
                for pid in pids:
                    _signal(pid, SIGKILL)
                left = deadline = None
            self._signals.wait_for_children(left)


def _signal(pid: int, number: Number) -> None:
    """Signal a child that has not been waited for; until then its id is not another one's."""
    with suppress(ProcessLookupError):
        kill(pid, number)
