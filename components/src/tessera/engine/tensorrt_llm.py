"""Vision rows from TensorRT-LLM's ``MultimodalEncoder``, which batches and runs in processes of its own.

Its rows come as handles to its memory and are copied once into the slots of our slab: from there they go on
under handles and leases of our own, by ``cuda_ipc`` among others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tessera.engine.base import Cost, Launched, packed_cost
from tessera.engine.config import EngineConfig
from tessera.engine.placement import Placement
from tessera.engine.tensorrt.module import load_tensorrt_llm
from tessera.engine.tensorrt_llm_handles import open_handle
from tessera.errors import ConfigError, EngineFailed
from tessera.models.base import Model
from tessera.models.tensorrt_llm import KnownToTensorRTLLM


class DisaggregatedParams(Protocol):
    """The one field of TensorRT-LLM's class of this name that is used here."""

    multimodal_embedding_handles: list[dict[str, Any]] | None


class RequestOutput(Protocol):
    """What ``generate_async`` returns; a future of itself."""

    disaggregated_params: DisaggregatedParams | None

    @property
    def finished(self) -> bool: ...

    def result(self, timeout: float | None = None) -> RequestOutput: ...


class MultimodalEncoder(Protocol):
    """The documented interface, as far as it is used."""

    def generate_async(self, inputs: Mapping[str, Any]) -> RequestOutput: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LaunchedEncode:
    """One request for each image; ``out`` is where its rows go."""

    requests: tuple[RequestOutput, ...]
    out: tuple[torch.Tensor, ...]

    def done(self) -> bool:
        # TensorRT-LLM may notice only while somebody waits for it: true is true, false may be late.
        return all(request.finished for request in self.requests)

    def result(self) -> None:
        for request, target in zip(self.requests, self.out, strict=True):
            params = request.result().disaggregated_params
            if params is None or not params.multimodal_embedding_handles:
                raise EngineFailed("TensorRT-LLM's encoder answered without embedding handles")
            rows = [open_handle(handle) for handle in params.multimodal_embedding_handles]
            count = sum(len(part) for part in rows)
            if count != len(target) or any(part.shape[1:] != target.shape[1:] for part in rows):
                raise EngineFailed(
                    f"TensorRT-LLM's encoder gave rows of {[list(part.shape) for part in rows]},"
                    f" expected were {list(target.shape)}"
                )
            start = 0
            for part in rows:
                target[start : start + len(part)].copy_(part)
                start += len(part)
        if self.out and self.out[0].is_cuda:
            # The encoder takes its memory back as soon as the handles are let go of.
            torch.cuda.current_stream(self.out[0].device).synchronize()


class TensorRTLLMVisionEngine:
    """Implements ``VisionEngine``; ``device`` says where the rows are wanted."""

    def __init__(self, model: Model, config: EngineConfig, placement: Placement) -> None:
        if not isinstance(model, KnownToTensorRTLLM):
            raise ConfigError(
                f"TensorRT-LLM's encoder does not know the family {model.family}, which has no"
                " tensorrt_llm_input; use engine: torch or tensorrt"
            )
        self._model: KnownToTensorRTLLM = model
        self._tiles = np.zeros((1, *model.tile_shape), np.uint8)
        self._rows = (model.tokens_per_tile, model.hidden)
        self._placement = placement
        make = load_tensorrt_llm().llmapi.MultimodalEncoder
        self._encoder: MultimodalEncoder = make(
            model=str(model.path), dtype=placement.dtype, max_batch_size=config.max_batch_cost
        )

    @property
    def cost(self) -> Cost:
        return packed_cost

    @property
    def depth(self) -> int:
        return 2

    def warm(self) -> None:
        rows = torch.empty(self._rows, dtype=self._placement.torch_dtype, device=self._placement.device)
        self.launch([self._tiles], [rows]).result()

    def launch(self, tiles: Sequence[npt.NDArray[np.uint8]], out: Sequence[torch.Tensor]) -> Launched[object]:
        requests = [self._encoder.generate_async(self._model.tensorrt_llm_input(image)) for image in tiles]
        return LaunchedEncode(tuple(requests), tuple(out))

    def close(self) -> None:
        self._encoder.shutdown()
