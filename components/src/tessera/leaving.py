"""The end of a process that has closed what it held."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End at once; what is left of the process is the kernel's to take back.

    The interpreter would first take every module apart: half a second of a processor with torch among them,
    for which whoever restarts the process waits. Threads and libraries that hold on to a broken device might
    even never let go of it.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # Nobody may be left to read it.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
