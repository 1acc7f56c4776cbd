"""Limits that a process sets for itself before it reads a hostile file."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from pathlib import Path
from typing import Final

from tessera.sandbox import seccomp

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


def confine(*, memory_bytes: int, filtered: bool = True, threads: bool = False) -> None:
    """``memory_bytes`` more address space than now, no byte to a file, no core dump, few descriptors.

    With ``filtered``, also no other files, connections, programs and processes (``seccomp``), and no threads
    but with ``threads``.
    """
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
    if filtered:
        seccomp.install(threads=threads)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option} failed")
