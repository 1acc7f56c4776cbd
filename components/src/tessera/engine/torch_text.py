"""The text engine in plain torch, for CPU and GPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tessera.engine.base import Cost, Finished, Launched, TextBatch, packed_cost
from tessera.engine.config import EngineConfig
from tessera.engine.torch_device import Placement
from tessera.engine.torch_event import EventLaunched
from tessera.models.base import Model


class TorchTextEngine:
    """Runs a family's text module on packed batches."""

    def __init__(self, model: Model, config: EngineConfig, placement: Placement) -> None:
        self._module = model.load_text(dtype=placement.dtype, device=placement.device)
        self._hidden = model.hidden
        self._max_tokens = min(config.max_batch_cost, model.max_tokens)
        self._placement = placement

    @property
    def cost(self) -> Cost:
        return packed_cost

    @property
    def depth(self) -> int:
        return 2 if self._placement.is_cuda else 1

    def warm(self) -> None:
        for length in (8, self._max_tokens if self._placement.is_cuda else 8):
            batch = TextBatch(
                input_ids=np.zeros(length, np.int32),
                positions=np.arange(length, dtype=np.int32),
                cu_seqlens=np.array([0, length], np.int32),
                lengths=(length,),
                vision=(),
                vision_index=np.empty(0, np.int32),
            )
            self.launch(batch).result()

    def launch(self, batch: TextBatch) -> Launched[npt.NDArray[np.float32]]:
        device = self._placement.device
        with torch.inference_mode():
            # One copy for all index arrays: four small ones cost four launches.
            sizes = [
                len(batch.input_ids),
                len(batch.positions),
                len(batch.cu_seqlens),
                len(batch.vision_index),
            ]
            indices = torch.from_numpy(
                np.concatenate((batch.input_ids, batch.positions, batch.cu_seqlens, batch.vision_index))
            )
            staged = indices.pin_memory() if self._placement.is_cuda else indices
            input_ids, positions, cu_seqlens, vision_index = torch.split(
                staged.to(device, non_blocking=True), sizes
            )
            vectors = self._module(
                input_ids, positions, cu_seqlens, batch.lengths, self._gather(batch), vision_index
            )
            if not self._placement.is_cuda:
                return Finished(vectors.numpy())
            host = torch.empty(vectors.shape, dtype=torch.float32, pin_memory=True)
            host.copy_(vectors, non_blocking=True)
            return EventLaunched.record(keep=(staged, batch.vision), host=host)

    def _gather(self, batch: TextBatch) -> torch.Tensor:
        dtype, device = self._placement.torch_dtype, self._placement.device
        if len(batch.vision) == 1:
            return batch.vision[0].to(device=device, dtype=dtype, non_blocking=True)
        rows = torch.empty(len(batch.vision_index), self._hidden, dtype=dtype, device=device)
        start = 0
        for image in batch.vision:
            rows[start : start + len(image)].copy_(image, non_blocking=True)
            start += len(image)
        return rows

    def close(self) -> None:
        del self._module
