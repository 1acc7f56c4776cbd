"""What a process holds, to see whether it grows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Size:
    """What a process holds; of shared memory the segments, because a slab's pages come as they are used."""

    private_mb: float
    files: int
    shared_memory: int

    @classmethod
    def of(cls, pid: int) -> Size:
        proc = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        private = int(status["RssAnon"].split()[0]) / 1024
        # Mapped once for its lease words and once for its rows: segments, not mappings, are counted.
        inodes = {line.split()[4] for line in (proc / "maps").read_text().splitlines() if "/memfd:" in line}
        return cls(private, len(list((proc / "fd").iterdir())), len(inodes))
