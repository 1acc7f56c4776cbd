"""The vision engine in plain torch, for CPU and GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tessera.engine.base import Cost, Finished, Launched, packed_cost
from tessera.engine.config import EngineConfig
from tessera.engine.torch_device import Placement
from tessera.engine.torch_event import EventLaunched
from tessera.models.base import Model


class TorchVisionEngine:
    """Runs a family's vision module on batches of whole images."""

    def __init__(self, model: Model, config: EngineConfig, placement: Placement) -> None:
        self._module = model.load_vision(dtype=placement.dtype, device=placement.device)
        self._tile_shape = model.tile_shape
        self._tokens_per_tile = model.tokens_per_tile
        self._hidden = model.hidden
        self._placement = placement
        self._max_tiles = max(config.max_batch_cost, model.max_tiles)

    @property
    def cost(self) -> Cost:
        return packed_cost

    @property
    def depth(self) -> int:
        return 2 if self._placement.is_cuda else 1

    def warm(self) -> None:
        # The widest batch too: what cannot be allocated must fail before the worker says it is ready.
        for count in (1, self._max_tiles if self._placement.is_cuda else 1):
            tiles = np.zeros((count, *self._tile_shape), np.uint8)
            out = torch.empty(
                count * self._tokens_per_tile,
                self._hidden,
                dtype=self._placement.torch_dtype,
                device=self._placement.device,
            )
            self.launch([tiles], [out]).result()

    def launch(self, tiles: Sequence[npt.NDArray[np.uint8]], out: Sequence[torch.Tensor]) -> Launched[object]:
        batch = torch.from_numpy(tiles[0] if len(tiles) == 1 else np.concatenate(tiles))
        with torch.inference_mode():
            if not self._placement.is_cuda:
                self._scatter(self._module(batch), out)
                return Finished(None)
            staged = batch.pin_memory()
            self._scatter(self._module(staged.to(self._placement.device, non_blocking=True)), out)
            return EventLaunched.record(keep=(staged,))

    def _scatter(self, rows: torch.Tensor, out: Sequence[torch.Tensor]) -> None:
        flat = rows.reshape(-1, self._hidden)
        start = 0
        for target in out:
            target.copy_(flat[start : start + len(target)], non_blocking=True)
            start += len(target)

    def close(self) -> None:
        del self._module
