"""Ports for services that are started only to be measured or tested."""

from __future__ import annotations

import os
import random
import socket
from collections import deque

# Names the variable with the ports that this process and its children may take, as FIRST-LAST.
PORTS = "BENCHMARKS_PORTS"
_FIRST, _LAST = 20_000, 31_999
# What was given, and may not be listened on yet: two ports for one process were the same once in thousands.
_given: deque[int] = deque(maxlen=256)


def free_ports(count: int) -> list[int]:
    """Consecutive ports that nobody listens on now, below 32768: the runtime reads its own as int16.

    None of the last 256 that this process was given.
    """
    lowest, highest = map(int, os.environ.get(PORTS, f"{_FIRST}-{_LAST}").split("-"))
    while True:
        first = random.randint(lowest, highest - count + 1)
        found = range(first, first + count)
        if not set(found).isdisjoint(_given):
            continue
        try:
            for port in found:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        _given.extend(found)
        return list(found)


def share(part: int, parts: int) -> str:
    """What ``PORTS`` holds for one of several processes, so that no two take the same port at once."""
    size = (_LAST - _FIRST + 1) // parts
    return f"{_FIRST + part * size}-{_FIRST + (part + 1) * size - 1}"
