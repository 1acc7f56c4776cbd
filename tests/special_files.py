"""Makes what stands where a small file is expected, and must not be read."""

from __future__ import annotations

import os
from pathlib import Path


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)
