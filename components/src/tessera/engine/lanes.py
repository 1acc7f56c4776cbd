"""CPU threads that run the pieces of one batch side by side."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, TypeVar

import torch

P = TypeVar("P")
R = TypeVar("R")

# What a lane does between two operations needs the interpreter's lock, for as long whatever the piece's size.
# On 16 cores a small model's 16 lanes used 4 of them and waited for the lock; 4 lanes of 4 threads did 2.2
# times as much. For a model of 1B parameters both took the same.
_MOST_LANES: Final = 4
# How much longer than an even share the busiest lane may take.
_UNEVEN: Final = 1.25
# Torch's default for new threads is the last number that any thread set for itself.
_SETTING = threading.Lock()


def threads_of(shares: Sequence[int], name: str) -> ThreadPoolExecutor:
    """A thread for each of the ``shares``, which runs torch's operations on so many threads of its own."""
    with _SETTING:
        threads = torch.get_num_threads()
        pool = ThreadPoolExecutor(len(shares), thread_name_prefix=name)
        together = threading.Barrier(len(shares))

        def begin(share: int) -> None:
            # A thread takes torch's number when it first needs one, and would forget one set before.
            torch.get_num_threads()
            torch.set_num_threads(share)
            together.wait()

        wait([pool.submit(begin, share) for share in shares])
        torch.set_num_threads(threads)
        return pool


class Lanes:
    """A few threads that divide torch's threads among them; each runs whole pieces of a batch on its share.

    An operation on several threads takes as long as the slowest of them, and a batch has hundreds. Whenever
    something else has one of their processors, the frontend say, the rest spin or sleep at the end of that
    operation: with half of one of two cores taken an engine lost half of its speed. When a lane is late the
    others take over its pieces, and those of the next batch behind them.
    """

    def __init__(self) -> None:
        threads = torch.get_num_threads()
        self.count = min(_MOST_LANES, threads)
        shares = [threads // self.count + (lane < threads % self.count) for lane in range(self.count)]
        self._pool = threads_of(shares, "lane")
        self._unfinished = 0
        self._counting = threading.Lock()

    def suit(self, sizes: Sequence[int]) -> bool:
        """Whether pieces of these sizes keep the lanes busy until about the end.

        Behind others, which end at different times, any do of which each lane can have one.
        """
        if self.count == 1 or len(sizes) < 2:
            return False
        if self.busy:
            return len(sizes) >= self.count
        lanes = [0] * self.count
        for size in sorted(sizes, reverse=True):
            heapq.heapreplace(lanes, lanes[0] + size)
        return max(lanes) * self.count <= _UNEVEN * sum(sizes)

    @property
    def busy(self) -> bool:
        """Whether pieces are under way or wait."""
        return self._unfinished > 0

    def start(self, work: Callable[[P], R], pieces: Sequence[P], sizes: Sequence[int]) -> list[Future[R]]:
        """Run ``work`` on each piece, behind those that were started before; the results in order."""
        # The largest first: if it began last, the batch would wait for it alone.
        order = sorted(range(len(pieces)), key=lambda index: -sizes[index])
        with self._counting:
            self._unfinished += len(order)
        begun = {index: self._pool.submit(work, pieces[index]) for index in order}
        for future in begun.values():
            future.add_done_callback(self._ended)
        return [begun[index] for index in range(len(pieces))]

    def _ended(self, _: Future[Any]) -> None:
        with self._counting:
            self._unfinished -= 1

    def close(self) -> None:
        self._pool.shutdown()
