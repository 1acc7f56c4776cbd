"""Settings of the interpreter for a process that runs an engine."""

from __future__ import annotations

import sys

from tessera.garbage import keep_all

# A batch gives up the interpreter's lock some two hundred times, and a busy event loop keeps it for as long
# as this, 5 ms by default, each time.
_SWITCH_SECONDS = 0.001


def tune_interpreter() -> None:
    """Shorten the switch interval and keep what exists from the garbage collector, torch's modules above all;
    call it when an engine is warm.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    keep_all()
