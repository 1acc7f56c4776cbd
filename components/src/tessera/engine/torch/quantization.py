"""Turns the GEMMs of a loaded module to FP8, if its engine config asks for it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.errors import ConfigError
from tessera.models.base import Feature, Model

# Ada, the first generation whose tensor cores multiply FP8.
_LEAST_CAPABILITY = (8, 9)


@runtime_checkable
class Quantisable(Protocol):
    """A module that can run its GEMMs in FP8, but for ``keep`` blocks at each end."""

    def quantise(self, *, keep: int) -> None: ...


def require_quantisable(model: Model, settings: EngineSettings, placement: Placement) -> None:
    """Raises ``ConfigError`` if the config asks for FP8 and family, device or dtype cannot."""
    if settings.quantization == "none":
        return
    if Feature.FP8 not in model.features:
        raise ConfigError(f"quantization fp8: the modules of family {model.family} have no FP8 form")
    if not placement.is_cuda or torch.cuda.get_device_capability(placement.device) < _LEAST_CAPABILITY:
        raise ConfigError(
            f"quantization fp8 needs a CUDA device of capability 8.9 or above, not {placement.device}"
        )
    if placement.dtype != "bfloat16":
        raise ConfigError(f"quantization fp8 needs dtype bfloat16, not {placement.dtype}")


def quantise(module: object, settings: EngineSettings) -> None:
    """Quantise a loaded module if the config says so."""
    if settings.quantization == "none":
        return
    assert isinstance(module, Quantisable)
    with torch.inference_mode():
        module.quantise(keep=settings.unquantized_blocks)
