"""What this process may use of its machine: cores, memory, and NVIDIA's cards.

The standard library alone: the launcher asks before anything is installed. Nothing is chosen here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/")

# Cgroup v1 says no limit by the largest number of whole pages.
_NO_LIMIT: Final = 1 << 62

# With a driver that hangs nothing would start, and nothing would say why.
_SMI_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU, or a part of one (MIG). ``entry`` names it in CUDA_VISIBLE_DEVICES; ``nbytes`` 0 is unknown."""

    entry: str
    name: str
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """``cores`` and ``nbytes`` of memory that the process may use, of which a part may be in use now."""

    cores: int
    nbytes: int
    cards: tuple[Card, ...] = ()


def this_machine(environment: Mapping[str, str]) -> Machine:
    """The machine as this process may use it; CUDA_VISIBLE_DEVICES hides cards."""
    return Machine(cores=cores(), nbytes=memory_bytes(), cards=cards(environment))


def cores(root: Path = _ROOT) -> int:
    """Cores by affinity, and by the quotas of the control groups, of which a part of a core is dropped."""
    quotas = (_quota(group) for group in _groups(root, "cpu"))
    found = [len(os.sched_getaffinity(0)), *(int(quota) for quota in quotas if quota is not None)]
    return max(1, min(found))


def memory_bytes(root: Path = _ROOT) -> int:
    """Bytes of memory, or of the least limit of the control groups."""
    limits = (_memory_limit(group) for group in _groups(root, "memory"))
    return min([_meminfo(root, "MemTotal"), *(limit for limit in limits if limit is not None)])


def free_memory_bytes(root: Path = _ROOT) -> int:
    """Bytes of memory that this process can still take."""
    left = [_meminfo(root, "MemAvailable")]
    for group in _groups(root, "memory"):
        limit, used = _memory_limit(group), _number(group, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            # Clean file pages count as used but are given up when they are needed. In v1 the groups below
            # count in the total alone.
            stat = dict(line.split() for line in _lines(group / "memory.stat"))
            left.append(limit - used + int(stat.get("total_inactive_file", stat.get("inactive_file", 0))))
    return min(left)


def _meminfo(root: Path, name: str) -> int:
    for line in _lines(root / "proc" / "meminfo"):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no {name}")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The control group of this process and those above it, as far as they can be seen, of v2 and of v1."""
    for line in _lines(root / "proc" / "self" / "cgroup"):
        _, names, own = line.split(":", 2)
        top = root / "sys" / "fs" / "cgroup"
        if names:
            if controller not in names.split(","):
                continue
            top /= names
        group = top / own.lstrip("/")
        while group != top.parent:
            # A container sees its own group as the top, whatever that is called outside.
            if group.is_dir():
                yield group
            group = group.parent


def _quota(group: Path) -> float | None:
    """Cores' worth of time that a group may use; None for no limit."""
    if lines := _lines(group / "cpu.max"):
        quota, period = lines[0].split()
        return None if quota == "max" else int(quota) / int(period)
    given, each = _number(group, "cpu.cfs_quota_us"), _number(group, "cpu.cfs_period_us")
    # In v1 -1 is no limit.
    return given / each if given is not None and given >= 0 and each else None


def _memory_limit(group: Path) -> int | None:
    limit = _number(group, "memory.max", "memory.limit_in_bytes")
    return limit if limit is not None and limit < _NO_LIMIT else None


def _number(group: Path, *names: str) -> int | None:
    """The number in the first of these files that there is; None for one that says ``max``."""
    for name in names:
        if lines := _lines(group / name):
            return int(lines[0]) if lines[0].lstrip("-").isdigit() else None
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def cards(environment: Mapping[str, str]) -> tuple[Card, ...]:
    """The cards that a process with this environment would see, in the order of their entries."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None and not named.strip():
        return ()
    if not (Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()):
        return ()
    return visible(_installed(environment), named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A whole GPU as its driver lists it; ``parts`` are its MIG devices where it is cut into such."""

    name: str
    uuid: str
    nbytes: int
    parts: tuple[Card, ...] | None = None


def visible(gpus: Iterable[Gpu], named: str | None) -> tuple[Card, ...]:
    """The cards that CUDA_VISIBLE_DEVICES leaves: ``named`` is its value, None where it is not set.

    As CUDA reads it, an entry that is no card hides those after it. Where it is not set, all are there: a
    process sees one MIG device at most, but each may be given one of its own.
    """
    found = list(gpus)
    if named is None:
        every = [
            gpu.parts if gpu.parts is not None else (_whole(gpu, str(index)),)
            for index, gpu in enumerate(found)
        ]
        return tuple(card for cards in every for card in cards)
    left: dict[str, Card] = {}
    for entry in (each.strip() for each in named.split(",")):
        card = _named(found, entry)
        if card is None or entry in left:
            break
        left[entry] = card
    return tuple(left.values())


def _whole(gpu: Gpu, entry: str) -> Card:
    return Card(entry=entry, name=gpu.name, nbytes=gpu.nbytes)


def _named(gpus: list[Gpu], entry: str) -> Card | None:
    if entry.isdigit():
        if int(entry) >= len(gpus):
            return None
        gpu = gpus[int(entry)]
        first = gpu.parts[0] if gpu.parts else _whole(gpu, entry)
        return Card(entry=entry, name=first.name, nbytes=first.nbytes)
    for gpu in gpus:
        # A UUID may be cut short.
        if entry.startswith("GPU-") and gpu.uuid.startswith(entry):
            return _whole(gpu, entry)
        for part in gpu.parts or ():
            if part.entry.startswith(entry) and entry.startswith("MIG-"):
                return Card(entry=entry, name=part.name, nbytes=part.nbytes)
    return None


_QUERY: Final = "name,uuid,memory.total,mig.mode.current"
_GPU_LINE: Final = re.compile(r"GPU \d+: .*\(UUID: (GPU-[^)]+)\)")
# Its memory is a part of its name: MIG 3g.20gb.
_MIG_LINE: Final = re.compile(r"\s+(MIG \S*?(\d+)gb\S*)\s.*\(UUID: (MIG-[^)]+)\)")


def _installed(environment: Mapping[str, str]) -> list[Gpu]:
    said = _smi(environment, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    if said is None:
        return _listed_by_driver()
    cut = any(line.endswith("Enabled") for line in said.splitlines())
    return read_gpus(said, _smi(environment, "--list-gpus") or "" if cut else "")


def read_gpus(query: str, listed: str) -> list[Gpu]:
    """What ``nvidia-smi`` said to a query of ``_QUERY``, and to ``--list-gpus`` where a card is cut up."""
    parts: dict[str, list[Card]] = {}
    of: list[Card] = []
    for line in listed.splitlines():
        if whole := _GPU_LINE.match(line):
            of = parts[whole[1]] = []
        elif part := _MIG_LINE.match(line):
            of.append(Card(entry=part[3], name=part[1], nbytes=int(part[2]) << 30))
    found = []
    for line in query.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 4:
            continue
        name, uuid, mebibytes, mode = cells
        # Where memory is shared with the processor there is no number.
        nbytes = int(mebibytes) << 20 if mebibytes.isdigit() else 0
        cut = tuple(parts.get(uuid, ())) if mode == "Enabled" else None
        found.append(Gpu(name=name.removeprefix("NVIDIA "), uuid=uuid, nbytes=nbytes, parts=cut))
    return found


def _smi(environment: Mapping[str, str], *arguments: str) -> str | None:
    """What ``nvidia-smi`` says; None where it is not there or fails."""
    import subprocess

    try:
        ran = subprocess.run(
            ["nvidia-smi", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SMI_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout


def _listed_by_driver() -> list[Gpu]:
    """The cards of which a device file is there, in the order of their places on the bus."""
    found = []
    for path in sorted((_ROOT / "proc" / "driver" / "nvidia" / "gpus").glob("*/information")):
        said = dict(line.partition(":")[::2] for line in _lines(path))
        minor = said.get("Device Minor", "").strip()
        if Path(f"/dev/nvidia{minor}").exists():
            name = said.get("Model", "").strip().removeprefix("NVIDIA ")
            found.append(Gpu(name=name, uuid=said.get("GPU UUID", "").strip(), nbytes=0))
    return found
