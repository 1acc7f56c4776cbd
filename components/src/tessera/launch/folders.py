"""The folders of a service for as long as one of its processes runs."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_PREFIX: Final = "tessera-run."
# Above the numbers by which children know what they inherit.
_HIGH: Final = 64
# A folder is there for a moment before it is locked.
_NEW_SECONDS: Final = 60.0


class Folders:
    """Folders below one in TMPDIR. Those that services left which were killed as a whole are removed first.

    ``descriptor`` is of the one above them. Every process of the service inherits it, and with it a lock that
    the system takes back when the last of them has ended.
    """

    def __init__(self) -> None:
        # Not tempfile, whose imports take 14 ms.
        above = Path(os.environ.get("TMPDIR") or "/tmp")
        for left in above.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                _remove_if_left(left)
        self.path = above / f"{_PREFIX}{os.urandom(6).hex()}"
        self.path.mkdir(mode=0o700)
        opened = _open(self.path)
        fcntl.flock(opened, fcntl.LOCK_EX)
        self.descriptor = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, _HIGH)
        os.close(opened)

    @property
    def free_bytes(self) -> int:
        """What is left where they are."""
        found = os.statvfs(self.descriptor)
        return found.f_bavail * found.f_frsize

    def make(self, name: str) -> Path:
        """A new folder."""
        made = self.path / name
        made.mkdir(mode=0o700)
        return made

    def remove(self) -> None:
        os.close(self.descriptor)
        _remove(self.path)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_if_left(path: Path) -> None:
    """Remove a folder of this user that no process has locked."""
    opened = _open(path)
    try:
        found = os.fstat(opened)
        if found.st_uid == os.geteuid() and found.st_ctime < time.time() - _NEW_SECONDS:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
    finally:
        os.close(opened)


def _remove(path: Path) -> None:
    # Not at the top: nobody waits for it there.
    import shutil

    shutil.rmtree(path, ignore_errors=True)
