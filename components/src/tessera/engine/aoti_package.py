"""A compiled stage out of its engine directory, with its weights out of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from tessera.engine.aoti_program import AotiProgram
from tessera.engine.building import product_kernels
from tessera.engine.building.aoti_flavour import PACKAGE, stages_of
from tessera.engine.building.aoti_machine import CPU, FLAGS, capability, require_cpu_flags, versions
from tessera.engine.building.envelope import envelope_of
from tessera.engine.building.manifest import Manifest
from tessera.engine.building.spec import Stage
from tessera.engine.config import EngineConfig
from tessera.engine.torch_device import Placement
from tessera.errors import ConfigError, EngineMismatch
from tessera.models.base import Model


class AotiPackage:
    """Positional tensors in, tensors out; what they are stands in ``manifest.bindings``.

    Runs on the current stream of the calling thread, one call at a time.
    """

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
        manifest.verify_files(directory)
        product_kernels.restore(directory)
        self.manifest = manifest
        self.envelope = envelope_of(manifest.profiles)
        self._directory = directory
        self._weights = self._load_weights(model, placement)
        index = (torch.device(placement.device).index or 0) if placement.is_cuda else -1
        self._program = AotiProgram(directory / PACKAGE, index)
        names = self._program.constants()
        if missing := sorted(set(names) - self._weights.keys()):
            raise EngineMismatch(
                f"{directory}: the engine wants {missing[0]!r}, which the model does not have"
            )
        self._weights = {name: self._weights[name] for name in names}
        self._program.use(self._weights)

    def _load_weights(self, model: Model, placement: Placement) -> dict[str, torch.Tensor]:
        module = (
            stages_of(model)
            .load_stage(
                self.manifest.stage,
                layout=self.manifest.layout,
                dtype=placement.dtype,
                device=placement.device,
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
                f" but {what} is {size}"
            )

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return self._program(*inputs)


def open_package(model: Model, config: EngineConfig, placement: Placement, stage: Stage) -> AotiPackage:
    """The engine at the config's ``path``; raises ``ConfigError`` without one, or for FP8."""
    if config.path is None:
        raise ConfigError("engine aoti needs path, the directory that tessera-engine build made")
    if config.quantization != "none":
        raise ConfigError(f"engine aoti has no quantization {config.quantization}; engine torch has")
    return AotiPackage(model, config.path, stage, placement)
