"""Packed batches of a compiled text stage on a CUDA device, replayed from CUDA graphs."""

from __future__ import annotations

from bisect import bisect_left
from functools import partial

import torch

from tessera.engine.aoti.modules import PackedModule, mapped
from tessera.engine.batch import TextBatch
from tessera.engine.graphs import Recorder, graph_sizes, sequences_of
from tessera.engine.placement import Placement
from tessera.engine.torch.cuda import CudaText


class AotiCudaText(CudaText):
    """The torch engine's copies and streams around graphs of the whole compiled stage."""

    def __init__(self, module: PackedModule, hidden: int, placement: Placement, *, graph_tokens: int) -> None:
        super().__init__(module, hidden, placement, graph_tokens=graph_tokens)
        self._packed = module
        self._whole: WholeTextGraphs | None = None

    def record(self) -> None:
        if not self._graph_tokens:
            return
        with torch.inference_mode(), torch.cuda.stream(self._streams.compute):
            self._whole = WholeTextGraphs(
                self._packed,
                hidden=self._hidden,
                placement=self._placement,
                stream=self._streams.compute,
                max_tokens=self._graph_tokens,
            )

    def _pooled(self, batch: TextBatch, indices: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        if self._whole is None or not self._whole.fits(len(indices[0]), len(batch.lengths)):
            return super()._pooled(batch, indices, rows)
        input_ids, positions, cu_seqlens, vision_index = indices
        rows, vision_map = mapped(input_ids, rows.to(self._placement.torch_dtype), vision_index)
        return self._whole.replay(input_ids, positions, cu_seqlens, rows, vision_map)


class WholeTextGraphs:
    """One graph for each of a few sizes; tokens beyond a batch belong to no sequence.

    As ``torch_graphs.TextGraphs``, but with the embedding inside, because it is inside the program.
    """

    def __init__(
        self,
        module: PackedModule,
        *,
        hidden: int,
        placement: Placement,
        stream: torch.cuda.Stream,
        max_tokens: int,
    ) -> None:
        self._program = module.program
        self._max_sequences = module.max_sequences
        # Largest first, so that the smaller ones find their memory in the pool.
        sizes = graph_sizes(max_tokens)[::-1]
        device, most = placement.device, sizes[0]
        self._input_ids = torch.zeros(most, dtype=torch.int32, device=device)
        self._positions = torch.zeros(most, dtype=torch.int32, device=device)
        self._vision_map = torch.full((most,), -1, dtype=torch.int32, device=device)
        self._rows = torch.zeros(most, hidden, dtype=placement.torch_dtype, device=device)
        self._ends = torch.zeros(self._sequences(most), dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        recorder = Recorder(stream)
        for size in sizes:
            self._ends.fill_(size)
            self._graphs[size] = recorder.record(partial(self._compute, size))
        self._sizes = sizes[::-1]

    def _compute(self, size: int) -> torch.Tensor:
        vectors, norms = self._program(
            self._input_ids[:size],
            self._positions[:size],
            self._ends[: self._sequences(size)],
            self._rows[:size],
            self._vision_map[:size],
        )
        return vectors * norms[:, None]

    def fits(self, tokens: int, sequences: int) -> bool:
        return tokens <= self._sizes[-1] and sequences <= self._sequences(self._size(tokens))

    def replay(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        rows: torch.Tensor,
        vision_map: torch.Tensor,
    ) -> torch.Tensor:
        """``[sequences, hidden]`` that the next replay overwrites."""
        tokens, sequences = len(input_ids), len(cu_seqlens) - 1
        self._input_ids[:tokens].copy_(input_ids)
        self._positions[:tokens].copy_(positions)
        self._vision_map[:tokens].copy_(vision_map)
        self._rows[: len(rows)].copy_(rows)
        # Empty sequences behind the last one.
        self._ends[:sequences].copy_(cu_seqlens[1:])
        self._ends[sequences:] = tokens
        graph, pooled = self._graphs[self._size(tokens)]
        graph.replay()
        return pooled[:sequences]

    def _size(self, tokens: int) -> int:
        return self._sizes[bisect_left(self._sizes, tokens)]

    def _sequences(self, size: int) -> int:
        return min(sequences_of(size), self._max_sequences)
