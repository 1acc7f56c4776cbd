"""Interruptions that wait for foreign code to come to an end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[Callable[[], bool]]:
    """Keep SIGINT and SIGTERM from raising inside the block; tells whether one has come.

    For code that calls back into Python and swallows what that raises. When the block ends, whatever it
    raises, the first one that came is handled as it would have been.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        # Handlers run in the main thread alone.
        yield lambda: False
        return
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if came:
            signal.raise_signal(came[0])
