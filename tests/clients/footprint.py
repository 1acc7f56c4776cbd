"""What the processes of a service hold, and whether it grows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Allocators keep some slack; a leak of one small image for each request would be many times this.
GROWTH_BYTES = 48 << 20
GROWTH_DESCRIPTORS = 24


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process holds: bytes resident, descriptors, bytes of shared memory that it maps."""

    resident: int
    descriptors: int
    shared: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = {
            line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "RssShmem"))
        }
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        return cls(int(fields["VmRSS"]) << 10, descriptors, int(fields["RssShmem"]) << 10)


def footprints(pids: Sequence[int]) -> dict[int, Footprint]:
    return {pid: Footprint.of(pid) for pid in pids}


def floor(samples: Sequence[Mapping[int, Footprint]]) -> dict[int, Footprint]:
    """The least that each process held of each: what is in flight comes and goes, and a leak stays."""
    pids = {pid for sample in samples for pid in sample}
    return {
        pid: Footprint(
            *(
                min(getattr(sample[pid], name) for sample in samples if pid in sample)
                for name in ("resident", "descriptors", "shared")
            )
        )
        for pid in pids
    }


def growth(before: Mapping[int, Footprint], after: Mapping[int, Footprint]) -> list[str]:
    """What grew beyond what is allowed; a process that is not there any more, or is new, counts as that."""
    found = [f"process {pid} came or went" for pid in before.keys() ^ after.keys()]
    for pid in before.keys() & after.keys():
        then, now = before[pid], after[pid]
        for name, limit in (
            ("resident", GROWTH_BYTES),
            ("descriptors", GROWTH_DESCRIPTORS),
            ("shared", GROWTH_BYTES),
        ):
            more = getattr(now, name) - getattr(then, name)
            if more > limit:
                found.append(f"process {pid}: {name} grew by {more}, from {getattr(then, name)}")
    return found
