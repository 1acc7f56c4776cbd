"""Child processes at the other end of a connection, as modules that are run with its descriptor."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from tessera.process_exit import leave
from tessera.sandbox.confinement import die_with_parent


def spawn(module: str, *, stdin: int | None = None) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start ``python -m module FD``, which ends with the thread that calls this; and our end."""
    ours, theirs = Pipe()
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=stdin,
            # What a library prints is not to be taken for the run's own answer.
            stdout=2,
        )
    return child, ours


def run(serve: Callable[[Connection], None]) -> None:
    """Be such a child until the other end has gone. Does not return, and waits for no thread."""
    die_with_parent()
    # A terminal sends it to the whole group; the run says when it is over.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError, EOFError), Connection(int(sys.argv[1])) as connection:
        serve(connection)
    leave(0)
