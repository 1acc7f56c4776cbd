"""``python -I -S bound.py PARENT PROGRAM NAME [ARGUMENT...]``: become a program that ends with its parent.

The kernel keeps the wish across ``exec`` and not across ``fork``. It has to be made in the child, and
``posix_spawn`` makes none: this takes 30 ms of each process's start, during which the others start, too.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main(argv: Sequence[str]) -> None:
    parent, program, *words = argv
    with suppress(ImportError):
        # A reduced Python may be without it; the program then is as others are.
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # One that ended before sent no signal.
    if os.getppid() != int(parent):
        os._exit(0)
    # The interpreter ignores these two.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execv(program, words)


if __name__ == "__main__":
    main(sys.argv[1:])
