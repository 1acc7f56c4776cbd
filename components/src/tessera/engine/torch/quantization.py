"""Turns the GEMMs of a loaded module to FP8, if its engine config asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import torch

from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.errors import ConfigError
from tessera.models.base import Feature, Model

M = TypeVar("M")

# Ada, the first generation whose tensor cores multiply FP8.
_LEAST_CAPABILITY = (8, 9)


@runtime_checkable
class Quantisable(Protocol):
    """A module that can run its GEMMs in FP8, but for ``keep`` blocks at each end."""

    def quantise(self, *, keep: int) -> None: ...


def loaded(load: Callable[..., M], model: Model, settings: EngineSettings, placement: Placement) -> M:
    """Return the module that ``load`` makes, quantised if the config says so.

    Raises ``ConfigError`` before anything is loaded if it asks for FP8 and family, device or dtype cannot.
    """
    if settings.quantization == "none":
        return load(dtype=placement.dtype, device=placement.device)
    if Feature.FP8 not in model.features:
        raise ConfigError(f"quantization fp8: the modules of family {model.family} have no FP8 form")
    if not placement.is_cuda or torch.cuda.get_device_capability(placement.device) < _LEAST_CAPABILITY:
        raise ConfigError(
            f"quantization fp8 needs a CUDA device of capability 8.9 or above, not {placement.device}"
        )
    if placement.dtype != "bfloat16":
        raise ConfigError(f"quantization fp8 needs dtype bfloat16, not {placement.dtype}")
    module = load(dtype=placement.dtype, device=placement.device)
    assert isinstance(module, Quantisable)
    with torch.inference_mode():
        module.quantise(keep=settings.unquantized_blocks)
    return module
