"""What ``proc(5)`` tells of other processes, any of which may end or close a file meanwhile."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def command_line(pid: int) -> list[str]:
    """Its program and arguments; nothing of a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def title(pid: int) -> str:
    """Its command line in one piece, which some processes change to what they do."""
    return " ".join(command_line(pid))


def environment(pid: int) -> dict[str, str]:
    """The variables that it was started with; none of one that has ended, or begins or ends just now."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def open_files(pid: int) -> list[str]:
    """What its descriptors stand for, as the kernel names it; nothing of a process that has ended."""
    found = []
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.append(os.readlink(descriptor))
    return found


def peak_bytes(pid: int) -> int:
    """The most memory that it has had at a time, since ``forget_peak``."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def forget_peak(pid: int) -> int:
    """Begin to count ``peak_bytes`` anew, and give what it is now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_bytes(pid)
