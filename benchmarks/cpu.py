"""What processes spend of the processor: figures that hold on a machine that others use too."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from benchmarks.proc import children

_TICK = 1.0 / os.sysconf("SC_CLK_TCK")
_CPUCLOCK_SCHED = 2
_NUMBERED = re.compile(r"[-_]?\d+$")
_MODULES = {
    "tessera.frontend": "frontend",
    "tessera.sandbox.child": "decoders",
    # As it was called before, in a service that is compared with.
    "tessera.worker.decoding.child": "decoders",
    "tessera.worker": "worker",
    "tessera.launch": "launcher",
    "benchmarks.floor": "floor",
    # vLLM's, some of which write their own titles.
    "vllm.entrypoints.cli.main": "frontend",
    "VLLM::APIServer": "frontend",
    "VLLM::EngineCore": "worker",
    "VLLM::Worker": "worker",
}
_STAGES = {"encode": "encode worker", "embed": "embed worker"}
WORKERS = ("worker", "encode worker", "embed worker")


def seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes so far, their ended children included."""
    return sum(sum(_ticks(pid)) for pid in pids) * _TICK


def _ticks(pid: int) -> tuple[int, int]:
    """Of the process's own threads, and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, 0
    # utime, stime, cutime and cstime of proc(5), counted from its third field on.
    return int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])


def running(module: str, pids: Iterable[int]) -> list[int]:
    """Those of the processes that were started with ``python -m module``."""
    return [pid for pid in pids if module in _arguments(pid)]


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def service_processes(pid: int) -> dict[int, str]:
    """The processes of a service below ``pid``, each by what it is: frontend, worker, decoders and so on."""
    found: dict[int, str] = {}
    below = [pid]
    while below:
        below = [child for parent in below for child in children(parent)]
        for child in below:
            arguments = _arguments(child)
            for argument in arguments:
                # Behind a title there may be a number.
                module = argument.split("_", 1)[0] if argument.startswith("VLLM::") else argument
                if module in _MODULES:
                    found[child] = next(
                        (_STAGES[word] for word in arguments if word in _STAGES), _MODULES[module]
                    )
                    break
    return found


Parts = dict[tuple[str, str], float]
"""Processor seconds by process and by part of it."""

_PARTS = {"tokio-rt-worker": "Dynamo's runtime"}


def parts(processes: dict[int, str]) -> Parts:
    """Processor seconds so far of the threads of ``processes``, those of one name together.

    The first thread is that of the event loop, where a process has one. Threads that have ended are a part
    of their own.
    """
    found: Parts = defaultdict(float)
    for pid, process in processes.items():
        try:
            # The process's clock of clock_getcpuclockid(3): nanoseconds, of ended threads too.
            total = time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
        except OSError:
            continue
        for task in Path(f"/proc/{pid}/task").glob("*"):
            try:
                # Nanoseconds on the processor of proc(5), where stat counts hundredths of a second.
                spent = int((task / "schedstat").read_text().split()[0]) / 1e9
                name = (task / "comm").read_text().strip()
            except (OSError, IndexError):
                continue
            if int(task.name) == pid:
                part = "main" if process == "decoders" else "event loop"
            else:
                part = _NUMBERED.sub("", name)
            found[process, _PARTS.get(part, part)] += spent
            total -= spent
        found[process, "ended threads"] += total
    return found


class Meter:
    """Implements ``load.clients.Watch``: what ``processes`` spend meanwhile, or all services below it."""

    def __init__(self, processes: dict[int, str] | None = None) -> None:
        self._processes = service_processes(os.getpid()) if processes is None else processes
        self._before: Parts = {}
        self._began = 0.0
        self.spent: Parts = {}
        self.seconds = 0.0

    def begin(self) -> None:
        self._before, self._began = parts(self._processes), time.monotonic()

    def end(self) -> None:
        after, self.seconds = parts(self._processes), time.monotonic() - self._began
        self.spent = {part: spent - self._before.get(part, 0.0) for part, spent in after.items()}

    def cores(self, *processes: str) -> float | None:
        """Processors that were busy with these; None where none of them runs."""
        found = [spent for (process, _), spent in self.spent.items() if process in processes]
        return sum(found) / self.seconds if found else None
