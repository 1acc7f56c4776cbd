"""Lets a process's threads have the interpreter while its event loop is busy."""

from __future__ import annotations

import asyncio
import resource
import threading
from typing import Final

# A loop that has waited for nothing for so long gives way, and from then on each 2 ms until it waits. Threads
# that come sooner bring less at a time: given way to each 2 ms of any load, a text took 1.10 +- 0.06 of the
# processor time with 64 at once. With 20 ms at any time, another key behind 600 calls had a p99 of 1.1 s.
_LOOK_SECONDS: Final = 0.02
_BUSY_SECONDS: Final = 0.002
# A thread that others keep from a processor holds the loop for no longer.
_MOST_SECONDS: Final = 0.001


class Bystander:
    """Is a thread that needs the interpreter for a moment, behind those that wait for it already.

    Owned by one other thread, which gives way to it. Ends with the process, or by ``end``.
    """

    def __init__(self) -> None:
        self._asked, self._came = threading.Lock(), threading.Lock()
        self._asked.acquire()
        self._came.acquire()
        self._expected = self._ended = False
        self.thread = threading.Thread(target=self._run, name="tessera-bystander", daemon=True)
        self.thread.start()

    def give_way(self, seconds: float = _MOST_SECONDS) -> bool:
        """Wait until the thread has had the interpreter, at most ``seconds``; return whether it has."""
        if not self._expected:
            self._expected = True
            self._asked.release()
        if self._came.acquire(timeout=seconds):
            self._expected = False
        return not self._expected

    def end(self) -> None:
        """Let the thread end."""
        self._ended = True
        # One that was expected in vain may have come since, and waits to be asked again.
        if self._asked.locked():
            self._asked.release()

    def _run(self) -> None:
        while True:
            self._asked.acquire()
            if self._ended:
                return
            self._came.release()


class SharedInterpreter:
    """Gives way to the process's threads while the event loop waits for nothing, until it is cancelled.

    A thread that wants the interpreter asks for it once it has waited for the switch interval without being
    woken. A busy loop lets go of it for a few microseconds in each of its rounds: that wakes the thread,
    which comes too late, and its wait begins anew. With rounds of 1 ms and a processor for each, a thread had
    the interpreter three times in 3 s. Replies of workers, calls of gRPC and files come by threads.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._bystander = Bystander()
        self._waits = _waits()
        self._timer = self._loop.call_later(_LOOK_SECONDS, self._look)

    def cancel(self) -> None:
        self._timer.cancel()
        self._bystander.end()

    def _look(self) -> None:
        busy = (waits := _waits()) == self._waits
        if busy:
            self._bystander.give_way()
            # To have given way is no wait of the loop's own.
            waits = _waits()
        self._waits = waits
        self._timer = self._loop.call_later(_BUSY_SECONDS if busy else _LOOK_SECONDS, self._look)


def _waits() -> int:
    """Return how often this thread has waited, for events or for others that had the interpreter."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
