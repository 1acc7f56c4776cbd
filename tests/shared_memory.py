"""What processes have mapped below ``/dev/shm``; other tests may run at the same time and use it, too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

FOLDER = "/dev/shm/"


def mapped(pids: Iterable[int]) -> set[Path]:
    """The named files of shared memory that these processes see now."""
    found = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        fields = (line.split(maxsplit=5) for line in lines)
        names = (parts[5] for parts in fields if len(parts) == 6)
        found |= {Path(name) for name in names if name.startswith(FOLDER) and not name.endswith("(deleted)")}
    return found
