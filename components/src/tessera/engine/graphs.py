"""Batches replayed from CUDA graphs: one launch instead of some two hundred.

Each launch from Python gives up the interpreter's lock and waits to get it back from a busy event loop,
so that under load a batch of a few thousand tokens took longer to launch than to compute.

A graph is recorded for each of a few sizes and reads and writes memory of its own. Replays follow one
another on one stream, so two batches in flight may use the same graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tessera.engine.streams import CudaStreams

Graph = tuple[Callable[[], None], torch.Tensor]
"""What replays it, and the output that each replay overwrites."""

Compute = Callable[[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes a packed batch from its rows, its positions and its members' bounds."""


def graph_sizes(most: int) -> list[int]:
    """Sizes from 32 to ``most``, in steps of a quarter of the next power of two, from 1024 on a sixteenth."""
    sizes = [32]
    while sizes[-1] < most:
        above = 1 << sizes[-1].bit_length()
        sizes.append(min(most, sizes[-1] + max(32, above // (4 if above <= 1024 else 16))))
    return sizes


class Graphs:
    """Graphs for batches packed along one axis: tokens of sequences, or units of images.

    There is a graph for each of ``sizes``, in ascending order, with room for ``room(size)`` members. A batch
    is padded to the next size; the padding belongs to no member, so nothing reads its output.

    ``rows`` are buffers ``[largest size, ...]`` and ``positions`` is one of int32 ``[k, largest size]``.
    ``compute`` is called with the beginnings of both and int32 bounds. The bounds are ``[room + 1]`` and
    begin with 0, or with ``ends_only`` the ends of the members alone, for a program that takes those at an
    aligned address.
    """

    def __init__(
        self,
        compute: Compute,
        rows: tuple[torch.Tensor, ...],
        positions: torch.Tensor,
        *,
        sizes: Sequence[int],
        room: Callable[[int], int],
        streams: CudaStreams,
        ends_only: bool = False,
    ) -> None:
        self._compute = compute
        self._rows = rows
        self._positions = positions
        self._sizes = list(sizes)
        self._room = room
        self._first = 0 if ends_only else 1
        most = self._first + max(map(room, sizes))
        self._bounds = torch.zeros(most, dtype=torch.int32, device=positions.device)
        self._graphs: dict[int, Graph] = {}
        # Largest first, so that the smaller ones find their memory in the pool.
        for size in reversed(self._sizes):
            self._bounds[self._first :] = size
            self._graphs[size] = streams.record(partial(self._run, size))

    def fits(self, size: int, members: int) -> bool:
        return size <= self._sizes[-1] and members <= self._room(self._padded(size))

    def bounds(self, bounds: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The bounds ``[members + 1]`` of a batch that fits as its graph takes them."""
        found = np.full(self._first + self._room(self._padded(int(bounds[-1]))), bounds[-1], np.int32)
        # Empty members behind the last one.
        found[: len(bounds) - 1 + self._first] = bounds[1 - self._first :]
        return found

    def replay(
        self, rows: Sequence[torch.Tensor], positions: torch.Tensor, bounds: torch.Tensor
    ) -> torch.Tensor:
        """Run a batch with ``bounds`` as above; returns the graph's output, which the next replay overwrites.

        ``positions`` says how large the batch is; some of ``rows`` may have fewer.
        """
        size = positions.shape[1]
        for buffer, value in zip(self._rows, rows, strict=True):
            buffer[: len(value)].copy_(value)
        if len(positions):
            self._positions[:, :size].copy_(positions)
        self._bounds[: len(bounds)].copy_(bounds)
        replay, computed = self._graphs[self._padded(size)]
        replay()
        return computed

    def _run(self, size: int) -> torch.Tensor:
        rows = tuple(buffer[:size] for buffer in self._rows)
        return self._compute(rows, self._positions[:, :size], self._bounds[: self._first + self._room(size)])

    def _padded(self, size: int) -> int:
        return self._sizes[bisect_left(self._sizes, size)]
