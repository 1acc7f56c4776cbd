"""What ``proc(5)`` tells of the processes that another one has started."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that its threads have started and not collected, for each thread in their order."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            # A thread that has ended; what it started is its process's.
            continue
    return found


def below(pid: int) -> list[int]:
    """Its children, theirs, and so on; without those that end while this looks."""
    found: list[int] = []
    for child in children(pid):
        found.append(child)
        with suppress(OSError):
            found += below(child)
    return found
