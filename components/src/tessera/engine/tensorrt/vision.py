"""The vision engine that TensorRT built."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tessera.engine.base import Cost, Launched, packed_cost
from tessera.engine.compiled.spec import Stage
from tessera.engine.config import EngineConfig
from tessera.engine.placement import Placement
from tessera.engine.process import settle
from tessera.engine.tensorrt.lane import CudaLane
from tessera.engine.tensorrt.loaded import LoadedEngine, open_engine
from tessera.engine.tensorrt.runs import check_vision_profiles
from tessera.engine.tensorrt.vision_runs import VisionRuns
from tessera.models.base import Model

# Tiles up to which launching a run takes a part of its time that is worth a copy of its rows.
_GRAPH_TILES = 4


class TensorRTVisionEngine:
    """Runs the vision stage of an engine directory; one thread drives it."""

    def __init__(self, model: Model, config: EngineConfig, placement: Placement) -> None:
        loaded = open_engine(model, config, placement, Stage.VISION)
        check_vision_profiles(loaded.manifest, str(config.path))
        self._loaded: LoadedEngine | None = loaded
        self._model = model
        self._placement = placement
        self._max_tiles = max(config.max_batch_cost, model.max_tiles)
        graphs = _GRAPH_TILES if config.graph_cost is None else config.graph_cost
        self._runs = VisionRuns(loaded, CudaLane(placement.device), placement.device, graph_tiles=graphs)

    @property
    def cost(self) -> Cost:
        return packed_cost

    @property
    def depth(self) -> int:
        return 2

    def warm(self) -> None:
        # The widest batch comes twice, because two are in flight.
        for launched in [self._run(self._max_tiles), self._run(self._max_tiles)]:
            launched.result()
        self._runs.record()
        self._run(1).result()
        if self._loaded is not None:
            self._loaded.keep_compiled()
        settle()

    def launch(self, tiles: Sequence[npt.NDArray[np.uint8]], out: Sequence[torch.Tensor]) -> Launched[object]:
        return self._runs.launch(tiles, out)

    def close(self) -> None:
        self._runs.close()
        self._loaded = None

    def _run(self, count: int) -> Launched[object]:
        out = torch.empty(
            count * self._model.tokens_per_tile,
            self._model.hidden,
            dtype=self._placement.torch_dtype,
            device=self._placement.device,
        )
        return self.launch([np.zeros((count, *self._model.tile_shape), np.uint8)], [out])
