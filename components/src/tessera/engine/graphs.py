"""Batches replayed from CUDA graphs: one launch instead of some two hundred.

Each launch from Python gives up the interpreter's lock and waits to get it back from a busy event loop,
so that under load a batch of a few thousand tokens took longer to launch than to compute.

A graph is recorded for each of a few sizes and reads and writes memory of its own. Replays follow one
another on one stream, so two batches in flight may use the same graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import torch

from tessera.engine.streams import Streams

Graph = tuple[Callable[[], None], torch.Tensor]
"""What replays it, and the output that each replay overwrites."""


def graph_sizes(most: int) -> list[int]:
    """Sizes from 32 to ``most``, in steps of a quarter of the next power of two, from 1024 on a sixteenth."""
    sizes = [32]
    while sizes[-1] < most:
        above = 1 << sizes[-1].bit_length()
        sizes.append(min(most, sizes[-1] + max(32, above // (4 if above <= 1024 else 16))))
    return sizes


class TextGraphs:
    """Graphs for batches of up to ``max_tokens`` tokens.

    A graph for ``size`` tokens has room for ``max(16, size // 32)`` sequences, at most ``max_sequences``.
    Tokens are padded to the next size; the padding belongs to no sequence, so nothing reads its output.

    ``inputs(n)`` allocates the buffers for ``n`` tokens, each with one row for a token. ``compute`` is called
    with the first rows of each buffer and int32 bounds, and returns ``[sequences, hidden]``. The bounds are
    cu_seqlens, or with ``ends_only`` the ends of the sequences, for a program that takes those at an aligned
    address.
    """

    def __init__(
        self,
        compute: Callable[..., torch.Tensor],
        inputs: Callable[[int], tuple[torch.Tensor, ...]],
        *,
        streams: Streams,
        device: str,
        max_tokens: int,
        max_sequences: int | None = None,
        ends_only: bool = False,
    ) -> None:
        self._compute = compute
        self._max_sequences = max_sequences
        self._first = 0 if ends_only else 1
        # Largest first, so that the smaller ones find their memory in the pool.
        sizes = graph_sizes(max_tokens)[::-1]
        self._inputs = inputs(sizes[0])
        most = self._first + self._sequences(sizes[0])
        self._bounds = torch.zeros(most, dtype=torch.int32, device=device)
        self._graphs: dict[int, Graph] = {}
        for size in sizes:
            self._bounds[self._first :] = size
            self._graphs[size] = streams.record(partial(self._run, size))
        self._sizes = sizes[::-1]

    def fits(self, tokens: int, sequences: int) -> bool:
        return tokens <= self._sizes[-1] and sequences <= self._sequences(self._size(tokens))

    def replay(self, *inputs: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Run the batch; returns ``[sequences, hidden]``, which the next replay overwrites.

        The first of ``inputs`` has a row for every token, the others may have fewer.
        """
        tokens, bounds = len(inputs[0]), cu_seqlens[1 - self._first :]
        for buffer, value in zip(self._inputs, inputs, strict=True):
            buffer[: len(value)].copy_(value)
        # Empty sequences behind the last one.
        self._bounds[: len(bounds)].copy_(bounds)
        self._bounds[len(bounds) :] = tokens
        replay, pooled = self._graphs[self._size(tokens)]
        replay()
        return pooled[: len(cu_seqlens) - 1]

    def _run(self, size: int) -> torch.Tensor:
        bounds = self._bounds[: self._first + self._sequences(size)]
        return self._compute(*(buffer[:size] for buffer in self._inputs), bounds)

    def _size(self, tokens: int) -> int:
        return self._sizes[bisect_left(self._sizes, tokens)]

    def _sequences(self, size: int) -> int:
        """Sequences that a graph for ``size`` tokens has room for."""
        room = max(16, size // 32)
        return room if self._max_sequences is None else min(room, self._max_sequences)


class VisionGraphs:
    """Graphs for 1 to ``max_tiles`` tiles, none of them padded."""

    def __init__(
        self,
        module: Callable[[torch.Tensor], torch.Tensor],
        *,
        tile_shape: tuple[int, int, int],
        streams: Streams,
        device: str,
        max_tiles: int,
    ) -> None:
        self._module = module
        self._tiles = torch.zeros(max_tiles, *tile_shape, dtype=torch.uint8, device=device)
        self._graphs: dict[int, Graph] = {
            count: streams.record(partial(self._run, count)) for count in range(max_tiles, 0, -1)
        }

    def _run(self, count: int) -> torch.Tensor:
        return self._module(self._tiles[:count])

    def fits(self, count: int) -> bool:
        return count in self._graphs

    def replay(self, tiles: torch.Tensor) -> torch.Tensor:
        """Run the tiles; returns rows that the next replay overwrites."""
        self._tiles[: len(tiles)].copy_(tiles)
        replay, rows = self._graphs[len(tiles)]
        replay()
        return rows
