"""Limits that a decoding process sets for itself before it reads a client's bytes."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38
_DESCRIPTORS: Final = 64


def die_with_parent(parent: int | None = None) -> None:
    """Be killed when the parent ends, however it ends; at once where ``parent`` is not the parent any more.

    Linux counts the thread that started this process as its parent.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(0)


def confine(*, memory_bytes: int) -> None:
    """``memory_bytes`` more address space than now, no byte to a file, no core dump, few descriptors."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _DESCRIPTORS),
        (resource.RLIMIT_AS, used + memory_bytes),
    ):
        hard = resource.getrlimit(limit)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(limit, (value, value))


def allow_cpu(seconds: float) -> None:
    """Be killed after so many more seconds of CPU time, rounded up; replaces what was allowed before."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option} failed")
