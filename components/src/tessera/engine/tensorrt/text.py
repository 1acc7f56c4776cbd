"""The text engine that TensorRT built."""

from __future__ import annotations

from tessera.engine.base import Cost, Launched, TextBatch, TextVectors, packed_cost, padded_cost
from tessera.engine.batch import zeros
from tessera.engine.compiled.spec import Layout, Stage
from tessera.engine.config import EngineConfig
from tessera.engine.placement import Placement
from tessera.engine.process import settle
from tessera.engine.tensorrt.lane import CudaLane
from tessera.engine.tensorrt.loaded import LoadedEngine, open_engine
from tessera.engine.tensorrt.runs import check_text_profiles
from tessera.engine.tensorrt.text_runs import TextRuns
from tessera.models.base import Model

# Tokens up to which a run is short enough for its launches to matter.
_GRAPH_TOKENS = 2048


class TensorRTTextEngine:
    """Runs the text stage of an engine directory; one thread drives it."""

    def __init__(self, model: Model, config: EngineConfig, placement: Placement) -> None:
        loaded = open_engine(model, config, placement, Stage.TEXT)
        check_text_profiles(loaded.manifest, model.max_tokens, str(config.path))
        self._loaded: LoadedEngine | None = loaded
        self._layout = loaded.manifest.layout
        graphs = _GRAPH_TOKENS if config.graph_cost is None else config.graph_cost
        self._runs = TextRuns(loaded, CudaLane(placement.device), placement.device, graph_tokens=graphs)
        self._max_length = model.max_tokens
        self._max_tokens = max(config.max_batch_cost, model.max_tokens)

    @property
    def cost(self) -> Cost:
        return padded_cost if self._layout is Layout.PADDED else packed_cost

    @property
    def depth(self) -> int:
        return 2

    def warm(self) -> None:
        # The widest batch comes twice, because two are in flight.
        widest = zeros(self._max_tokens, self._max_length)
        for launched in [self.launch(zeros(8, 8)), self.launch(widest), self.launch(widest)]:
            launched.result()
        self._runs.record()
        self.launch(zeros(8, 8)).result()
        if self._loaded is not None:
            self._loaded.keep_compiled()
        settle()

    def launch(self, batch: TextBatch) -> Launched[TextVectors]:
        return self._runs.launch(batch)

    def close(self) -> None:
        self._runs.close()
        self._loaded = None
