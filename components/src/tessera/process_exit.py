"""When a process is told to end, and its end once it has closed what it held."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def when_told(stop: Callable[[], object]) -> None:
    """Call ``stop`` on the running loop at each SIGTERM and SIGINT.

    SIGINT stays ignored where whoever started the process has it ignored: a terminal sends it to everybody,
    and the launch scripts end the processes one kind after another.
    """
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGINT, stop)


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
