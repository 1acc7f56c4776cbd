"""What ``proc(5)`` tells of other processes, any of which may end or close a file meanwhile."""

from __future__ import annotations

import os
from pathlib import Path


def command_line(pid: int) -> list[str]:
    """Its program and arguments; nothing of a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    except OSError:
        return []


def open_files(pid: int) -> list[str]:
    """What its descriptors stand for, as the kernel names it."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(descriptor))
        except OSError:
            continue
    return found
