"""What a pool and its processes share: limits, and memory that both have mapped."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

MAX_BYTES: Final = 1 << 16
"""Of a message, which is one datagram of a socket pair."""

IN_MEMORY: Final = -1
"""No descriptor: where a pool is given bytes they are in the memory that it shares with a process."""

# What a fork server says when it is; the second where the kernel has no seccomp.
READY: Final = b"ready"
READY_UNFILTERED: Final = b"ready, unfiltered"

Memory = npt.NDArray[np.uint8]

# Memory that can shrink turns an access into a bus error.
_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one process may use: ``seconds`` of CPU time for one task, ``memory_bytes`` beyond what it has
    from the start, and ``threads`` if it needs some."""

    seconds: float
    memory_bytes: int
    threads: bool = False

    @property
    def stuck_seconds(self) -> float:
        """How long a task may take at all, which ends one that waits for what does not come.

        A machine with sixteen times as much to do as it has cores gives a process all its CPU time by then.
        A JPEG of 12 megapixels once took 10 s of the clock at fifteen times.
        """
        return 16 * self.seconds


class Handler(Protocol):
    """What a confined process does."""

    def answer(self, memory: Memory, task: bytes, descriptor: int) -> bytes:
        """Do a task with the file in ``descriptor``, which is closed afterwards.

        With ``IN_MEMORY`` the file is at the beginning of ``memory``.

        The answer is a message; results that are large lie in ``memory``, as the pool expects them. What it
        raises ends the process.
        """
        ...


def shared(nbytes: int) -> int:
    """A descriptor of ``nbytes`` of zeros whose size can never change; the caller closes it."""
    descriptor = os.memfd_create("tessera-results", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def mapped(descriptor: int) -> Memory:
    """Such memory as uint8 ``[nbytes]``, which keeps it mapped; closes the descriptor."""
    try:
        return np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
    finally:
        os.close(descriptor)
