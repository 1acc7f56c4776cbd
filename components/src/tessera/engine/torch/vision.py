"""The vision engine in torch, for CPU and GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tessera.engine.batch import Cost, packed_cost
from tessera.engine.lanes import Lanes
from tessera.engine.placement import Placement
from tessera.engine.process import one_thread, tune_interpreter
from tessera.engine.settings import EngineSettings
from tessera.engine.torch.cuda import CudaVision
from tessera.engine.torch.quantization import quantise
from tessera.launched import Launched
from tessera.models.base import Model, VisionModule


class TorchVisionEngine:
    """Runs a family's vision module on batches of whole images, on the CPU tile by tile."""

    _divisible = True

    def __init__(self, model: Model, settings: EngineSettings, placement: Placement) -> None:
        self._module = self._load(model, settings, placement)
        self._tile_shape = model.tile_shape
        self._tokens_per_tile = model.tokens_per_tile
        self._hidden = model.hidden
        self._placement = placement
        self._max_tiles = max(settings.max_batch_cost, model.max_tiles)
        self._cuda: CudaVision | None = None
        self._lanes = None if placement.is_cuda or not self._divisible else Lanes()
        if placement.is_cuda:
            tiles = self._max_tiles if settings.graph_cost is None else settings.graph_cost
            self._cuda = CudaVision(
                self._module, model.tile_shape, placement, graph_tiles=min(tiles, self._max_tiles)
            )

    def _load(self, model: Model, settings: EngineSettings, placement: Placement) -> VisionModule:
        module = model.load_vision(dtype=placement.dtype, device=placement.device)
        quantise(module, settings, placement)
        return module

    @property
    def cost(self) -> Cost:
        return packed_cost

    @property
    def depth(self) -> int:
        return 2 if self._placement.is_cuda else 1

    def warm(self) -> None:
        if self._cuda is None:
            with one_thread():
                self._run(1).result()
            tune_interpreter()
            return
        # cuDNN plans its attention for each batch size anew, 0.05 s each: no request should wait for that.
        # The widest comes first and twice, because two batches are in flight: what cannot be allocated
        # must fail before the worker says it is ready.
        for launched in [self._run(self._max_tiles), self._run(self._max_tiles)]:
            launched.result()
        self._cuda.record()
        for count in range(self._max_tiles - 1, self._cuda.graph_tiles, -1):
            self._run(count).result()
        self._run(1).result()
        tune_interpreter()

    def launch(self, tiles: Sequence[npt.NDArray[np.uint8]], out: Sequence[torch.Tensor]) -> Launched[object]:
        if self._cuda is not None:
            return self._cuda.launch(tiles, out)
        batch = tiles[0] if len(tiles) == 1 else np.concatenate(tiles)
        sizes = [1] * len(batch)
        with torch.inference_mode():
            if self._lanes is not None and self._lanes.suit(sizes):
                flat = torch.cat(self._lanes.map(self._encoded, np.split(batch, len(batch)), sizes))
            else:
                flat = self._encoded(batch)
            start = 0
            for target in out:
                target.copy_(flat[start : start + len(target)])
                start += len(target)
            return Launched.of(None)

    def _encoded(self, tiles: npt.NDArray[np.uint8]) -> torch.Tensor:
        with torch.inference_mode():
            return self._module(torch.from_numpy(tiles)).reshape(-1, self._hidden)

    def _run(self, count: int) -> Launched[object]:
        tiles = np.zeros((count, *self._tile_shape), np.uint8)
        out = torch.empty(
            count * self._tokens_per_tile,
            self._hidden,
            dtype=self._placement.torch_dtype,
            device=self._placement.device,
        )
        return self.launch([tiles], [out])

    def close(self) -> None:
        self._cuda = None
        if self._lanes is not None:
            self._lanes.close()
        del self._module
