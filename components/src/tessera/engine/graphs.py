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
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class SplitTextModule(Protocol):
    """A text module whose embedding can run apart from the rest."""

    def embed(
        self, input_ids: torch.Tensor, vision_rows: torch.Tensor, vision_index: torch.Tensor
    ) -> torch.Tensor: ...

    def pooled(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
    ) -> torch.Tensor: ...


class Recorder:
    """Records functions into graphs that share one pool of memory."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        compute()  # compiles kernels and builds plans, which must not happen while recording
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = compute()
        return graph, result


def graph_sizes(most: int) -> list[int]:
    """From 32 to ``most``, in steps of a quarter, from 1024 on a sixteenth, of the next power of two."""
    sizes = [32]
    while sizes[-1] < most:
        above = 1 << sizes[-1].bit_length()
        sizes.append(min(most, sizes[-1] + max(32, above // (4 if above <= 1024 else 16))))
    return sizes


class TextGraphs:
    """Graphs for batches of up to ``max_tokens`` tokens, in sequences of 32 on average, or 16 in all.

    Tokens are padded to the next size; the padding belongs to no sequence, so that nothing reads what is
    computed for it.
    """

    def __init__(
        self,
        module: SplitTextModule,
        *,
        hidden: int,
        dtype: torch.dtype,
        device: str,
        stream: torch.cuda.Stream,
        max_tokens: int,
    ) -> None:
        self._module = module
        # Largest first, so that the smaller ones find their memory in the pool.
        sizes = graph_sizes(max_tokens)[::-1]
        self._embedded = torch.zeros(sizes[0], hidden, dtype=dtype, device=device)
        self._positions = torch.zeros(sizes[0], dtype=torch.int32, device=device)
        self._bounds = torch.zeros(sequences_of(sizes[0]) + 1, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        recorder = Recorder(stream)
        for size in sizes:
            self._bounds[1:] = size
            self._graphs[size] = recorder.record(partial(self._compute, size))
        self._sizes = sizes[::-1]

    def _compute(self, size: int) -> torch.Tensor:
        bounds = self._bounds[: sequences_of(size) + 1]
        return self._module.pooled(self._embedded[:size], self._positions[:size], bounds, (size,))

    def fits(self, tokens: int, sequences: int) -> bool:
        return tokens <= self._sizes[-1] and sequences <= sequences_of(self._size(tokens))

    def replay(
        self, embedded: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> torch.Tensor:
        """``[batch, hidden]`` that the next replay overwrites."""
        tokens, sequences = embedded.shape[0], cu_seqlens.shape[0] - 1
        self._embedded[:tokens].copy_(embedded)
        self._positions[:tokens].copy_(positions)
        # Empty sequences behind the last one.
        self._bounds[: sequences + 1].copy_(cu_seqlens)
        self._bounds[sequences + 1 :] = tokens
        graph, pooled = self._graphs[self._size(tokens)]
        graph.replay()
        return pooled[:sequences]

    def _size(self, tokens: int) -> int:
        return self._sizes[bisect_left(self._sizes, tokens)]


def sequences_of(size: int) -> int:
    """Sequences that a graph for ``size`` tokens has room for."""
    return max(16, size // 32)


class VisionGraphs:
    """Graphs for 1 to ``max_tiles`` tiles, none of them padded."""

    def __init__(
        self,
        module: Callable[[torch.Tensor], torch.Tensor],
        *,
        tile_shape: tuple[int, int, int],
        device: str,
        stream: torch.cuda.Stream,
        max_tiles: int,
    ) -> None:
        self._module = module
        self._tiles = torch.zeros(max_tiles, *tile_shape, dtype=torch.uint8, device=device)
        recorder = Recorder(stream)
        self._graphs = {
            count: recorder.record(partial(self._compute, count)) for count in range(max_tiles, 0, -1)
        }

    def _compute(self, count: int) -> torch.Tensor:
        return self._module(self._tiles[:count])

    def fits(self, count: int) -> bool:
        return count in self._graphs

    def replay(self, tiles: torch.Tensor) -> torch.Tensor:
        """Rows that the next replay overwrites."""
        self._tiles[: len(tiles)].copy_(tiles)
        graph, rows = self._graphs[len(tiles)]
        graph.replay()
        return rows
