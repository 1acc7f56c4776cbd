"""The vision engine compiled ahead of time; batches, streams and graphs are those of the torch engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.engine.base import vision_of
from tessera.engine.batch import VisionBatch, uint8_pixels
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.engine.torch.vision import TorchVisionEngine
from tessera.launched import Launched
from tessera.models.base import Model, VisionModule
from tessera_engines.aoti.package import AotiProgram, open_package
from tessera_engines.compiled.spec import Stage


class AotiVisionModule:
    """Implements ``VisionModule``."""

    def __init__(self, program: AotiProgram) -> None:
        self._program = program

    def __call__(
        self,
        pixels: torch.Tensor,
        positions: torch.Tensor,
        cu_units: torch.Tensor,
        units: Sequence[int],
    ) -> torch.Tensor:
        (rows,) = self._program(pixels)
        return rows.flatten(0, 1)


class AotiVisionEngine(TorchVisionEngine):
    """Runs an engine directory of the stage ``vision``."""

    takes_floats = False
    # One package runs one batch at a time.
    _divisible = False

    def _load(self, model: Model, settings: EngineSettings, placement: Placement) -> VisionModule:
        package = open_package(model, settings, placement, Stage.VISION)
        most = max(settings.max_batch_cost, vision_of(model).max_units)
        package.require_room("units", most, "the larger of max_batch_cost and one image's units")
        return AotiVisionModule(package.load())

    def launch(self, batch: VisionBatch, out: Sequence[torch.Tensor]) -> Launched[object]:
        uint8_pixels(batch)
        return super().launch(batch, out)
