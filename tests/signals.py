"""Signals to processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.waiting import wait_until


def default_signals() -> None:
    """What a terminal sends ends a process again.

    It is ignored where the tests themselves run in the background or under nohup, and a shell cannot trap
    what it finds ignored.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def signal_process(pid: int, number: signal.Signals) -> None:
    """As ``os.kill``, to which a process that is not there, -1, would mean every process of the machine."""
    assert pid > 0, "the process is not there"
    os.kill(pid, number)


def freeze(pid: int) -> None:
    """Stop a process and wait until it does: its threads go on until each of them has seen the signal."""
    signal_process(pid, signal.SIGSTOP)
    wait_until(lambda: all(_state(task) in "TtZX" for task in Path(f"/proc/{pid}/task").iterdir()))


def _state(task: Path) -> str:
    """``proc(5)``: the third field of ``stat``, behind a name that may hold anything."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
