"""Counts what a process does, which other work on a machine leaves alone: instructions, or bytecodes.

Instructions are counted by valgrind's callgrind: a process runs some fifty times as slowly, one thread at a
time. Bytecodes are those of Python alone. What a process starts is not counted.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from benchmarks.proc import below
from benchmarks.within import bytecodes

_TOTAL: Final = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)
_IDLE_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 0.01
_WRITES_SECONDS: Final = 60.0


class Counter(ABC):
    """Counts in the process of ``module`` that this one has started by ``command`` with the same folder."""

    name: str

    def __init__(self, folder: Path, module: str) -> None:
        self._folder = folder
        words = {self.command(folder)[-1].encode(), module.encode()}
        self._pid = next(pid for pid in below(os.getpid()) if words <= _words(pid))
        self._idle, self._idle_seconds = 0.0, 0.0

    @staticmethod
    @abstractmethod
    def command(folder: Path) -> tuple[str, ...]:
        """Return what the process's command begins with, so that counts come into the folder."""

    @abstractmethod
    def _begin(self) -> None:
        """Begin to count anew."""

    @abstractmethod
    def _counted(self) -> int:
        """Return the count since ``_begin``."""

    def of(self, work: Callable[[], None]) -> float:
        """Do the work, and return what was counted meanwhile.

        Without that of the process's own loops, which is as much in each second, whether it works or not.
        """
        idle, seconds = self._count(lambda: time.sleep(_IDLE_SECONDS))
        self._idle += idle
        self._idle_seconds += seconds
        counted, seconds = self._count(work)
        return counted - seconds * self._idle / self._idle_seconds

    def _count(self, work: Callable[[], None]) -> tuple[int, float]:
        """Return a count and its seconds."""
        self._begin()
        began = time.monotonic()
        work()
        counted = self._counted()
        return counted, time.monotonic() - began


class Instructions(Counter):
    """Counts instructions of the processor."""

    name = "instructions"

    def __init__(self, folder: Path, module: str) -> None:
        super().__init__(folder, module)
        self._control("--instr=on")

    @staticmethod
    def command(folder: Path) -> tuple[str, ...]:
        options = ("--tool=callgrind", "--instr-atstart=no", "--smc-check=all-non-file", "--quiet")
        return ("valgrind", *options, f"--callgrind-out-file={folder / 'counts'}")

    def _begin(self) -> None:
        self._control("--zero")

    def _counted(self) -> int:
        there = set(self._folder.glob("counts*"))
        self._control("--dump")
        (written,) = set(self._folder.glob("counts*")) - there
        found = _TOTAL.search(written.read_text())
        assert found is not None, written
        written.unlink()
        return int(found[1])

    def _control(self, what: str) -> None:
        subprocess.run(["callgrind_control", what, str(self._pid)], check=True, capture_output=True)


class Bytecodes(Counter):
    """Counts bytecodes; ``last`` has those of the last work by file and function, idle ones included."""

    name = "bytecodes"
    last: Mapping[str, int]

    @staticmethod
    def command(folder: Path) -> tuple[str, ...]:
        return ("env", f"{bytecodes.VARIABLE}={folder / 'counts'}")

    def _begin(self) -> None:
        self._written()

    def _counted(self) -> int:
        self.last = self._written()
        return sum(self.last.values())

    def _written(self) -> dict[str, int]:
        file = self._folder / "counts"
        file.unlink(missing_ok=True)
        os.kill(self._pid, signal.SIGUSR2)
        end = time.monotonic() + _WRITES_SECONDS
        while not file.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"it writes no counts in {_WRITES_SECONDS:.0f} s")
            time.sleep(_PAUSE_SECONDS)
        found: dict[str, int] = json.loads(file.read_text())
        return found


def _words(pid: int) -> set[bytes]:
    """Return the words of a process's command and of its environment."""
    try:
        command, environment = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
    except OSError:
        return set()
    return {*command.split(b"\0"), *environment.split(b"\0")}
