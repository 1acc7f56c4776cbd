"""Child processes, and the signals that tell the launcher of them."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A terminal sends them to all of its processes.
_OF_THE_TERMINAL: Final = (signal.SIGINT, signal.SIGHUP)
_Action = tuple[int, int, str, int, int] | tuple[int, int, int]


class Told(Exception):
    """A signal told the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class Signals:
    """Signals are blocked and asked for: none interrupts anything, and none is lost.

    SIGINT and SIGHUP are ignored for the sake of the children, which inherit that: what a terminal sends to
    everybody is for the launcher alone, which ends the others in their order. A signal that is blocked stays
    pending though it is ignored. One that the launcher itself finds ignored (``nohup``) stays so.
    """

    def __init__(self) -> None:
        self._heard = {number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN}
        # Ignored here, children would not be there to wait for.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {*_ENDING, signal.SIGCHLD})
        # What is pending when it is ignored is lost.
        self._early = signal.sigpending() & self._heard
        for number in self.from_the_terminal:
            signal.signal(number, signal.SIG_IGN)
        self._had_terminal = _has_terminal()
        self.rereads = False
        """Whether SIGHUP is not for the end, as long as the terminal of the start is there."""
        self.told_to_reread = False
        """Whether SIGHUP has come since somebody made this false."""

    @property
    def from_the_terminal(self) -> set[signal.Signals]:
        return self._heard.intersection(_OF_THE_TERMINAL)

    def wait(self, seconds: float | None) -> None:
        """Wait for the end of a child or for SIGHUP, for ``seconds`` at most. Raises ``Told``."""
        number = self._early.pop() if self._early else _wait({*self._heard, signal.SIGCHLD}, seconds)
        if number not in self._heard:
            return
        # A terminal that is closed is taken from all of its processes before they are told.
        if number == signal.SIGHUP and self.rereads and _has_terminal() >= self._had_terminal:
            self.told_to_reread = True
            return
        raise Told(number)

    def wait_for_children(self, seconds: float | None) -> None:
        """The same, while nothing else is listened to."""
        _wait({signal.SIGCHLD}, seconds)

    def replaced(self) -> None:
        """Before another program takes this one's place: it is to find signals as they were, but blocked."""
        for number in self.from_the_terminal:
            signal.signal(number, signal.SIG_DFL)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _wait(numbers: set[signal.Signals], seconds: float | None) -> int:
    """The signal that came, 0 when none did."""
    if seconds is None:
        return signal.sigwaitinfo(numbers).si_signo
    came = signal.sigtimedwait(numbers, max(0.0, seconds))
    return 0 if came is None else came.si_signo


_BOUND: Final = str(Path(__file__).with_name("bound.py"))

FIRST_DESCRIPTOR: Final = 3
"""The number by which a child knows the first of the descriptors that it inherits."""


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: Path | None = None,
    errors: bool = True,
    descriptors: Sequence[int] = (),
) -> int:
    """Start a process in the background: it has no input, and ignores what a terminal sends; its id.

    It is killed when this process ends in any way; for the kernel that is the thread which calls this.
    ``output`` is a file for what it writes, with its ``errors`` if these are to go there, too. Of
    ``descriptors`` it inherits copies, with numbers from ``FIRST_DESCRIPTOR`` on; their own numbers are above
    those. Raises ``OSError`` when the program cannot be started.
    """
    actions: list[_Action] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    if output is not None:
        actions.append((os.POSIX_SPAWN_OPEN, 1, str(output), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        if errors:
            actions.append((os.POSIX_SPAWN_DUP2, 1, 2))
    actions += [
        (os.POSIX_SPAWN_DUP2, own, number) for number, own in enumerate(descriptors, FIRST_DESCRIPTOR)
    ]
    bound = [sys.executable, "-I", "-S", _BOUND, str(os.getpid()), _program(command[0], environment)]
    return _spawn([*bound, *command], environment, actions, set())


def _program(name: str, environment: Mapping[str, str]) -> str:
    """The path of a program. Raises ``FileNotFoundError``."""
    for folder in [""] if "/" in name else os.get_exec_path(environment):
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def run(command: Sequence[str], environment: Mapping[str, str], signals: Signals) -> int:
    """Run a command in the foreground, where Ctrl-C ends it; its status."""
    pid = _spawn(command, environment, [], signals.from_the_terminal)
    while (status := collect(pid)) is None:
        signals.wait_for_children(None)
    return status


def _spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    actions: Sequence[_Action],
    heeded: set[signal.Signals],
) -> int:
    # The interpreter ignores these two.
    defaults = {signal.SIGPIPE, signal.SIGXFSZ} | heeded
    return os.posix_spawnp(
        command[0], list(command), environment, file_actions=actions, setsigmask=(), setsigdef=defaults
    )


def collect(pid: int) -> int | None:
    """The status of a child that has ended, as a shell says it; None for one that runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


@dataclass(slots=True, eq=False)
class Child:
    """A process that is started again when it ends; ``pid`` is None while it is not there.

    ``status`` is what it ended with last, as a shell says it.
    ``descriptors`` are what it inherits.
    ``due`` is when it will be started again, of ``time.monotonic``. ``delay`` is how many seconds after its
    end that is. One that is ``leaving`` was told to end and is not started again; ``due`` is
    when it is killed.
    """

    name: str
    role: str
    command: Sequence[str]
    environment: Mapping[str, str]
    descriptors: Sequence[int] = ()
    pid: int | None = None
    started: float = 0.0
    delay: int = 1
    due: float | None = None
    status: int | None = None
    leaving: bool = False
