"""What processes spend of the processor: figures that hold on a machine that others use too."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


def seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes so far, their ended children included."""
    return sum(_ticks(pid) for pid in pids) * _TICK


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    # utime, stime, cutime and cstime of proc(5), counted from its third field on.
    return sum(int(field) for field in fields[11:15])


def running(module: str, pids: Iterable[int]) -> list[int]:
    """Those of the processes that were started with ``python -m module``."""
    found = []
    for pid in pids:
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if module.encode() in arguments:
            found.append(pid)
    return found
