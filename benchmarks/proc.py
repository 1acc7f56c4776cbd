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


def runs(pid: int) -> bool:
    """Whether one of its threads runs or waits for a processor."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                if (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "R":
                    return True
    return False


def below(pid: int) -> list[int]:
    """Its children, theirs, and so on; without those that end while this looks.

    It looks at each process of the machine, 3 ms beside a cluster of Ray; ``children`` looks at each thread.
    """
    offspring: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The name, in brackets, may have any character in it; what follows is the state, and the parent.
            fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
            offspring.setdefault(int(fields[1]), []).append(int(process.name))
    found, looked_at = list(offspring.get(pid, ())), 0
    while looked_at < len(found):
        found += offspring.get(found[looked_at], ())
        looked_at += 1
    return found
