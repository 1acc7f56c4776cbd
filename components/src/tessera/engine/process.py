"""Settings of the interpreter and of torch for a process that runs an engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread; for the warm-up on the CPU, where other workers may be serving.

    Their operations are on all processors and wait for the slowest. With a warm-up on all 16 processors for
    0.1 s beside them answers took up to 133 ms; a process that imports its libraries on one is not felt.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
