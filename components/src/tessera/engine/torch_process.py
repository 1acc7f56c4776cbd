"""What a process with a torch engine in it asks of the interpreter."""

from __future__ import annotations

import gc
import sys

# A batch gives up the interpreter's lock some two hundred times, and a busy event loop keeps it for as long
# as this, 5 ms by default, each time.
_SWITCH_SECONDS = 0.001


def settle() -> None:
    """Called when an engine is warm.

    What exists by now, torch's modules above all, lives as long as the process: the collector need not
    walk through it again and again, which stops every thread.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
