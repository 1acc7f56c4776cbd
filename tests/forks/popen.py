"""A ``subprocess.Popen`` that asks the server of forks."""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.forks.program import ROOM, Module, differs, imported_with
from tests.forks.server import LONGEST, MODULES, Request

ROOT = Path(__file__).parents[2]
_SCRIPTS = {str(ROOT / "launch" / f"{name}.sh"): name for name in ("agg", "e_p")}
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
# One process begins at a time: the subreaper is for all threads.
_asking = threading.Lock()


_Executed = subprocess.Popen


class Forked(subprocess.Popen[bytes]):
    """Starts a module of the service, or a launch script's launcher, without an import of its own.

    Any other program, and one whose environment a fork would not heed, starts as it always does.
    ``forks`` counts those that did not.
    """

    forks = 0

    def _execute_child(self, args: Sequence[str], executable: Any, preexec_fn: Any, *rest: Any) -> None:
        close_fds, pass_fds, cwd, env, _, _, shell, *pipes = rest
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, *ids, new_session, group = pipes
        command = _as_module(list(map(str, args)))
        module = Module.of(command)
        environment = dict(os.environ if env is None else env)
        others = (
            shell,
            executable is not None,
            not close_fds,
            group != -1,
            *(i not in (None, -1) for i in ids),
        )
        if any(others) or module is None or module.name not in MODULES or differs(environment):
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        given = [own if own != -1 else number for number, own in enumerate((p2cread, c2pwrite, errwrite))]
        mask = os.umask(0)
        os.umask(mask)
        request = Request(
            tuple(command),
            environment,
            os.fspath(cwd or os.getcwd()),
            mask,
            (0, 1, 2, *pass_fds),
            bool(new_session),
            preexec_fn,
        )
        self.pid = _ask(request, [*given, *pass_fds])
        self._child_created = True
        Forked.forks += 1
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _as_module(command: list[str]) -> list[str]:
    """The command line that a launch script comes to; any other one as it is."""
    if (script := _SCRIPTS.get(command[0])) is not None:
        return [sys.executable, "-m", "tessera.launch", "--root", str(ROOT), script, *command[1:]]
    return command


def _ask(request: Request, descriptors: Iterable[int]) -> int:
    """The id of a new child of this process."""
    with _asking:
        channel = SERVER.channel()
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(channel, [pickle.dumps(request)], list(descriptors))
            if not (said := channel.recv(LONGEST)):
                raise RuntimeError("the server of forks has ended")
        finally:
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    pid: int = pickle.loads(said)
    return pid


class _Server:
    """The server of this process, begun when it is first asked."""

    def __init__(self) -> None:
        self._asked: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def use(self, channel: socket.socket) -> None:
        """Ask one that is there."""
        self._asked = channel

    def channel(self) -> socket.socket:
        if self._asked is None:
            self._asked, theirs = channel()
            number = theirs.fileno()
            with theirs:
                self._process = _Executed(
                    [sys.executable, "-m", "tests.forks.server", str(number), ROOM],
                    cwd=ROOT,
                    env=imported_with | {"ROOM": ROOM},
                    pass_fds=[number],
                    start_new_session=True,
                )
            atexit.register(self._end)
        return self._asked

    def _end(self) -> None:
        """Have the server end, which it does when nobody can ask it any more."""
        assert self._asked is not None and self._process is not None
        self._asked.close()
        self._process.wait(timeout=60)


SERVER = _Server()


def channel() -> tuple[socket.socket, socket.socket]:
    """The ends of a channel between who asks and a server."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
    return ends


def fork_all() -> None:
    """Fork, from now on, wherever this process uses ``subprocess``."""
    # Begun here, it is none of the processes that a test looks for.
    SERVER.channel()
    subprocess.Popen = Forked  # type: ignore[misc]
