"""Launches batches of tokens and of tiles on a CUDA device; nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from tessera.engine.batch import TextBatch, TextVectors
from tessera.engine.graphs import TextGraphs, VisionGraphs
from tessera.engine.placement import Placement
from tessera.engine.streams import CudaStreams, sendable
from tessera.launched import Launched
from tessera.models.base import TextModule, VisionModule


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


class CudaText:
    """Owns the streams and graphs of a text module; ``graph_tokens`` 0 records no graphs."""

    def __init__(self, module: TextModule, hidden: int, placement: Placement, *, graph_tokens: int) -> None:
        self._module = module
        self._hidden = hidden
        self._placement = placement
        self._streams = CudaStreams(placement.device)
        self._graph_tokens = graph_tokens
        self._graphs: TextGraphs | None = None

    def record(self) -> None:
        """Record the graphs, if the module allows it."""
        if self._graph_tokens:
            with torch.inference_mode(), self._streams.computing():
                self._graphs = self._recorded()

    def launch(self, batch: TextBatch) -> Launched[TextVectors]:
        with torch.inference_mode():
            with self._streams.copying():
                staged, on_device = self._indices(batch)
                sources, rows = self._rows(batch)
            with self._streams.computing():
                pooled = self._pooled(batch, on_device, rows.to(self._placement.torch_dtype))
                host = self._streams.staging(tuple(pooled.shape), torch.float32)
                host.copy_(pooled, non_blocking=True)
                keep = (staged, on_device, sources, rows, pooled)
                # Scaled on the host, once the pooled vectors are there.
                return self._streams.launched(lambda: TextVectors.of(host.numpy()), keep=keep)

    def _pooled(self, batch: TextBatch, indices: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        input_ids, positions, cu_seqlens, vision_index = indices
        if self._graphs is not None and self._graphs.fits(len(input_ids), len(batch.lengths)):
            return self._replayed(self._graphs, indices, rows)
        return self._module(input_ids, positions, cu_seqlens, batch.lengths, rows, vision_index)

    def _recorded(self) -> TextGraphs | None:
        """Graphs of what follows the embedding, since vision rows have other places in each batch."""
        module = self._module
        if not isinstance(module, SplitTextModule):
            return None

        def pooled(embedded: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
            return module.pooled(embedded, positions, cu_seqlens, (len(embedded),))

        def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
            device, dtype = self._placement.device, self._placement.torch_dtype
            return (
                torch.zeros(tokens, self._hidden, dtype=dtype, device=device),
                torch.zeros(tokens, dtype=torch.int32, device=device),
            )

        return TextGraphs(
            pooled,
            inputs,
            streams=self._streams,
            device=self._placement.device,
            max_tokens=self._graph_tokens,
        )

    def _replayed(self, graphs: TextGraphs, indices: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        assert isinstance(self._module, SplitTextModule)
        input_ids, positions, cu_seqlens, vision_index = indices
        embedded = self._module.embed(input_ids, rows, vision_index)
        return graphs.replay(embedded, positions, cu_seqlens=cu_seqlens)

    def _indices(self, batch: TextBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Send all index arrays in one copy; returns the pinned source and views on the device."""
        arrays: tuple[npt.NDArray[np.int32], ...] = (
            batch.input_ids,
            batch.positions,
            batch.cu_seqlens,
            batch.vision_index,
        )
        # Each begins on a 16-byte boundary, because kernels are compiled once more for pointers that do not.
        starts = np.cumsum([0, *(-(-len(array) // 4) * 4 for array in arrays)]).tolist()
        staged = self._streams.staging((starts[-1],), torch.int32)
        view = staged.numpy()
        for array, start in zip(arrays, starts[:-1], strict=True):
            view[start : start + len(array)] = array
        device = staged.to(self._placement.device, non_blocking=True)
        return staged, [
            device[start : start + len(array)] for array, start in zip(arrays, starts[:-1], strict=True)
        ]

    def _rows(self, batch: TextBatch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Send the vision rows; returns what the copies read, and ``[rows, hidden]`` on the device."""
        images = tuple(sendable(image, self._streams) for image in batch.vision)
        if not images:
            return (), torch.empty(
                0, self._hidden, dtype=self._placement.torch_dtype, device=self._placement.device
            )
        if len(images) == 1 and images[0].is_cuda:
            return images, images[0]
        if all(image.is_cuda for image in images):
            return images, torch.cat(images)
        rows = torch.empty(
            sum(map(len, images)), self._hidden, dtype=images[0].dtype, device=self._placement.device
        )
        start = 0
        for image in images:
            rows[start : start + len(image)].copy_(image, non_blocking=True)
            start += len(image)
        return images, rows


class CudaVision:
    """Owns the streams and graphs of a vision module; ``graph_tiles`` 0 records no graphs."""

    def __init__(
        self,
        module: VisionModule,
        tile_shape: tuple[int, int, int],
        placement: Placement,
        *,
        graph_tiles: int,
    ) -> None:
        self._module = module
        self._tile_shape = tile_shape
        self._placement = placement
        self._streams = CudaStreams(placement.device)
        self.graph_tiles = graph_tiles
        self._graphs: VisionGraphs | None = None

    def record(self) -> None:
        if not self.graph_tiles:
            return
        with torch.inference_mode(), self._streams.computing():
            self._graphs = VisionGraphs(
                self._module,
                tile_shape=self._tile_shape,
                device=self._placement.device,
                streams=self._streams,
                max_tiles=self.graph_tiles,
            )

    def launch(self, tiles: Sequence[npt.NDArray[np.uint8]], out: Sequence[torch.Tensor]) -> Launched[None]:
        with torch.inference_mode():
            staged = self._streams.staging((sum(map(len, tiles)), *self._tile_shape), torch.uint8)
            np.concatenate(tiles, out=staged.numpy())
            with self._streams.copying():
                batch = staged.to(self._placement.device, non_blocking=True)
            with self._streams.computing():
                fits = self._graphs is not None and self._graphs.fits(len(batch))
                rows = self._graphs.replay(batch) if fits and self._graphs else self._module(batch)
                flat = rows.flatten(0, 1)
                start = 0
                for target in out:
                    target.copy_(flat[start : start + len(target)], non_blocking=True)
                    start += len(target)
                return self._streams.launched(lambda: None, keep=(staged, batch, rows))
