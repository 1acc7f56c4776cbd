"""One batch of tiles on a CUDA device, without waiting for it anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tessera.engine.graphs import VisionGraphs
from tessera.engine.placement import Placement
from tessera.engine.streams import Streams, pinned
from tessera.engine.torch_event import EventLaunched
from tessera.models.base import VisionModule


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
        self._streams = Streams(placement.device)
        self.graph_tiles = graph_tiles
        self._graphs: VisionGraphs | None = None

    def record(self) -> None:
        if not self.graph_tiles:
            return
        with torch.inference_mode(), torch.cuda.stream(self._streams.compute):
            self._graphs = VisionGraphs(
                self._module,
                tile_shape=self._tile_shape,
                device=self._placement.device,
                stream=self._streams.compute,
                max_tiles=self.graph_tiles,
            )

    def launch(self, tiles: Sequence[npt.NDArray[np.uint8]], out: Sequence[torch.Tensor]) -> EventLaunched:
        with torch.inference_mode():
            staged = pinned((sum(map(len, tiles)), *self._tile_shape), torch.uint8)
            np.concatenate(tiles, out=staged.numpy())
            with torch.cuda.stream(self._streams.copies):
                batch = staged.to(self._placement.device, non_blocking=True)
            with torch.cuda.stream(self._streams.compute):
                self._streams.after_copies()
                fits = self._graphs is not None and self._graphs.fits(len(batch))
                rows = self._graphs.replay(batch) if fits and self._graphs else self._module(batch)
                flat = rows.flatten(0, 1)
                start = 0
                for target in out:
                    target.copy_(flat[start : start + len(target)], non_blocking=True)
                    start += len(target)
                return EventLaunched.record(keep=(staged, batch, rows))
