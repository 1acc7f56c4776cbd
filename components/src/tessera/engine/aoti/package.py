"""An engine directory that holds a compiled stage; the weights come out of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from tessera.engine.aoti import kernels
from tessera.engine.aoti.build import PACKAGE, stages_of
from tessera.engine.aoti.machine import CPU, FLAGS, capability, require_cpu_flags, versions
from tessera.engine.aoti.program import AotiProgram
from tessera.engine.compiled.manifest import Manifest
from tessera.engine.compiled.spec import Stage, envelope_of
from tessera.engine.config import EngineConfig
from tessera.engine.placement import Placement
from tessera.errors import ConfigError, EngineMismatch
from tessera.models.base import Model


class AotiPackage:
    """What was built, once it is known to be for this model and machine."""

    def __init__(self, model: Model, directory: Path, stage: Stage, placement: Placement) -> None:
        """Raises ``EngineMismatch`` naming both sides where the engine is not for this model and machine."""
        manifest = Manifest.read(directory)
        manifest.require(
            directory,
            flavour="aoti",
            stage=stage,
            dtype=placement.dtype,
            family=model.family,
            fingerprint=model.fingerprint,
            hidden=model.hidden,
            capability=capability(placement.device),
            versions=versions(placement.device),
        )
        if capability(placement.device) == CPU:
            require_cpu_flags(manifest.notes.get(FLAGS, ""), directory)
        manifest.verify_files(directory, PACKAGE)
        self.manifest = manifest
        self.envelope = envelope_of(manifest.profiles)
        self._model = model
        self._directory = directory
        self._placement = placement

    def load(self) -> AotiProgram:
        """Raises ``EngineMismatch`` where the engine wants weights that the model does not have."""
        kernels.restore(self._directory)
        device = torch.device(self._placement.device)
        index = (device.index or 0) if self._placement.is_cuda else None
        return AotiProgram(self._directory / PACKAGE, self._weights(), index)

    def _weights(self) -> dict[str, torch.Tensor]:
        module = (
            stages_of(self._model)
            .load_stage(
                self.manifest.stage,
                layout=self.manifest.layout,
                dtype=self._placement.dtype,
                device=self._placement.device,
                max_sequences=self.envelope["sequences"].max,
            )
            .module
        )
        return {name: value.detach() for name, value in (*module.named_parameters(), *module.named_buffers())}

    def require_room(self, axis: str, size: int, what: str) -> None:
        """Raises ``EngineMismatch`` when the engine was not built for sizes up to ``size``."""
        most = self.envelope[axis].max
        if size > most:
            raise EngineMismatch(
                f"{self._directory}: the engine does not match: it was built for up to {most} {axis},"
                f" but {what} is {size}; build it with larger profiles, or lower max_batch_cost"
            )


def open_package(model: Model, config: EngineConfig, placement: Placement, stage: Stage) -> AotiPackage:
    """The engine at the config's ``path``; raises ``ConfigError`` without one, or for FP8."""
    if config.path is None:
        raise ConfigError(f"engine 'aoti' needs path: the --out of tessera-engine build --stage {stage}")
    if config.quantization != "none":
        raise ConfigError(f"engine aoti has no quantization {config.quantization}; engine torch has")
    return AotiPackage(model, config.path, stage, placement)
