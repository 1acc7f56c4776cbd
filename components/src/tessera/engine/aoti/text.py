"""The text engine compiled ahead of time; batches and streams are those of the torch engine."""

from __future__ import annotations

from tessera.engine.aoti.cuda import AotiCudaText
from tessera.engine.aoti.modules import PackedModule, PaddedModule, bucketed_cost
from tessera.engine.aoti.package import open_package
from tessera.engine.base import Cost, packed_cost
from tessera.engine.compiled.spec import Layout, Stage
from tessera.engine.config import EngineConfig
from tessera.engine.placement import Placement
from tessera.engine.torch.cuda import CudaText
from tessera.engine.torch.text import TorchTextEngine
from tessera.errors import ConfigError
from tessera.models.base import Model, TextModule


class AotiTextEngine(TorchTextEngine):
    """Runs an engine directory of the stage ``text``: padded on the CPU, packed anywhere."""

    # One package runs one batch at a time.
    _divisible = False

    def _load(self, model: Model, config: EngineConfig, placement: Placement) -> TextModule:
        package = open_package(model, config, placement, Stage.TEXT)
        most = max(config.max_batch_cost, model.max_tokens)
        sequences = package.envelope["sequences"].max
        if package.manifest.layout is Layout.PACKED:
            package.require_room("tokens", most, "the larger of max_batch_cost and the longest input")
            package.require_room("rows", most, "the larger of max_batch_cost and the longest input")
            return PackedModule(package.load(), sequences)
        if placement.is_cuda:
            raise ConfigError(
                f"{config.path}: on CUDA engine aoti runs layout packed, and this one is padded"
            )
        package.require_room("tokens", model.max_tokens, "the longest input")
        package.require_room("rows", most, "the larger of max_batch_cost and the longest input")
        return PaddedModule(package.load(), sequences)

    def _on_cuda(self, module: TextModule, placement: Placement, graph_tokens: int) -> CudaText:
        assert isinstance(module, PackedModule)
        return AotiCudaText(module, self._hidden, placement, graph_tokens=graph_tokens)

    @property
    def cost(self) -> Cost:
        return bucketed_cost if isinstance(self._module, PaddedModule) else packed_cost
