"""Checks the flags of workers that a caller passes on to engines."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tessera.flags import check_flags, flags_of
from tessera.worker.settings import WorkerSettings


def worker_flags() -> Collection[str]:
    """Return the names of all flags that a worker takes."""
    return flags_of(WorkerSettings)


def check_worker_flags(flags: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a value that a worker would refuse."""
    check_flags(WorkerSettings, [*flags, "--model-path=."])
