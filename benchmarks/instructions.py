"""Counts the instructions of a frontend by valgrind's callgrind, which other work on a machine leaves alone.

A frontend runs some fifty times as slowly, one thread at a time; what it starts is not counted.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.proc import below

_TOTAL: Final = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)
_PAUSE_SECONDS: Final = 0.02
_IDLE_SECONDS: Final = 3.0


def command(folder: Path) -> tuple[str, ...]:
    """Return what a frontend's command begins with, so that counts come into the folder."""
    options = ("--tool=callgrind", "--instr-atstart=no", "--smc-check=all-non-file", "--quiet")
    return ("valgrind", *options, _out(folder))


class Counter:
    """Counts the instructions of the frontend that this process has started by ``command``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = next(pid for pid in below(os.getpid()) if _is_counted(pid, folder))
        # Instructions, and seconds.
        self._idle: tuple[list[float], list[float]] = ([], [])
        self._control("--instr=on")

    def of(self, work: Callable[[], None]) -> float:
        """Do the work, and return the instructions that were counted meanwhile.

        Without those of the frontend's own loops, which are as many in each second, whether it works or not.
        """
        for total, value in zip(self._idle, self._count(lambda: time.sleep(_IDLE_SECONDS)), strict=True):
            total.append(value)
        instructions, seconds = self._count(work)
        idle, idle_seconds = map(sum, self._idle)
        return instructions - seconds * idle / idle_seconds

    def _count(self, work: Callable[[], None]) -> tuple[int, float]:
        """Return instructions and seconds."""
        self._control("--zero")
        began = time.monotonic()
        work()
        there = set(self._folder.glob("counts*"))
        self._control("--dump")
        seconds = time.monotonic() - began
        (written,) = set(self._folder.glob("counts*")) - there
        found = _TOTAL.search(written.read_text())
        assert found is not None, written
        written.unlink()
        return int(found[1]), seconds

    def _control(self, what: str) -> None:
        subprocess.run(["callgrind_control", what, str(self._pid)], check=True, capture_output=True)


def _is_counted(pid: int, folder: Path) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return _out(folder).encode() in words and b"tessera.frontend" in words


def _out(folder: Path) -> str:
    return f"--callgrind-out-file={folder / 'counts'}"


def stand_in() -> None:
    """Wait for children where there are no descriptors of processes, as under valgrind."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        os.pidfd_open = _ended


def _ended(pid: int, flags: int = 0) -> int:
    """Wait until a child has ended, and return a descriptor that is readable."""
    while _state(pid) not in "ZX":
        time.sleep(_PAUSE_SECONDS)
    return os.open(os.devnull, os.O_RDONLY)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
