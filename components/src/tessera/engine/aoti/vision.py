"""The vision engine compiled ahead of time; batches, streams and graphs are those of the torch engine."""

from __future__ import annotations

import torch

from tessera.engine.aoti.package import AotiProgram, open_package
from tessera.engine.compiled.spec import Stage
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.engine.torch.vision import TorchVisionEngine
from tessera.models.base import Model, VisionModule


class AotiVisionModule:
    """Implements ``VisionModule``."""

    def __init__(self, program: AotiProgram) -> None:
        self._program = program

    def __call__(self, tiles: torch.Tensor) -> torch.Tensor:
        (rows,) = self._program(tiles)
        return rows


class AotiVisionEngine(TorchVisionEngine):
    """Runs an engine directory of the stage ``vision``."""

    # One package runs one batch at a time.
    _divisible = False

    def _load(self, model: Model, settings: EngineSettings, placement: Placement) -> VisionModule:
        package = open_package(model, settings, placement, Stage.VISION)
        most = max(settings.max_batch_cost, model.max_tiles)
        package.require_room("tiles", most, "the larger of max_batch_cost and one image's tiles")
        return AotiVisionModule(package.load())
