"""The signals that end a process, and its exit once it has closed what it held."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn

ENGINE_DEAD: Final = 70
"""The exit status of a process whose engine has died, EX_SOFTWARE; whoever started it starts a new one."""


def when_told(stop: Callable[[], object]) -> None:
    """Call ``stop`` on the running loop at each SIGTERM and SIGINT.

    SIGINT stays ignored if it was ignored at the start: a terminal sends it to all processes of a job, and
    the launcher ends them in its own order.
    """
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGINT, stop)


def leave(status: int) -> NoReturn:
    """Exit at once, without the interpreter's own clean-up; the kernel frees what is left.

    The interpreter would first tear down every module: half a second of a processor with torch among them,
    which a restart waits for. Threads and libraries that hold a broken device might never let go of it.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # The reader may be gone.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
