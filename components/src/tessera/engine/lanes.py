"""The pieces of one batch side by side on the CPU."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, TypeVar

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


class Lanes:
    """A few threads that share those which torch has for an operation; each works off pieces on its own.

    An operation on several threads takes as long as the slowest of them, and a batch has hundreds. Whenever
    something else has one of their processors, the frontend say, the rest spin or sleep at the end of that
    operation: with half of one of two cores taken an engine lost half of its speed. Lanes wait for each other
    once, at the end of the batch, and what one of them is late with the others take over.
    """

    def __init__(self) -> None:
        with _SETTING:
            threads = torch.get_num_threads()
            self.count = min(_MOST_LANES, threads)
            shares = [threads // self.count + (lane < threads % self.count) for lane in range(self.count)]
            self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="lane")
            together = threading.Barrier(self.count)

            def begin(share: int) -> None:
                # A thread takes torch's number when it first needs one, and would forget one set before.
                torch.get_num_threads()
                torch.set_num_threads(share)
                together.wait()

            wait([self._pool.submit(begin, share) for share in shares])
            torch.set_num_threads(threads)

    def suit(self, sizes: Sequence[int]) -> bool:
        """Whether pieces of these sizes keep the lanes busy until about the end."""
        if self.count == 1 or len(sizes) < 2:
            return False
        lanes = [0] * self.count
        for size in sorted(sizes, reverse=True):
            heapq.heapreplace(lanes, lanes[0] + size)
        return max(lanes) * self.count <= _UNEVEN * sum(sizes)

    def map(self, work: Callable[[P], R], pieces: Sequence[P], sizes: Sequence[int]) -> list[R]:
        """The results in order; raises the first error, once nothing is running any more."""
        # The largest first: one that began last would be waited for alone.
        order = sorted(range(len(pieces)), key=lambda index: -sizes[index])
        begun = {index: self._pool.submit(work, pieces[index]) for index in order}
        wait(begun.values())
        return [begun[index].result() for index in range(len(pieces))]

    def close(self) -> None:
        self._pool.shutdown()
