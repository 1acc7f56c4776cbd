"""Loads a module with the products that its engine config asks for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol, TypeVar, runtime_checkable

import torch

from tessera.checkpoint.loading import as_stored
from tessera.engine.placement import Placement
from tessera.engine.quantization import FP8, NONE, Stage, require, resolved
from tessera.engine.settings import EngineSettings
from tessera.models.base import Model

M = TypeVar("M")


@runtime_checkable
class Quantisable(Protocol):
    """A module that can run its GEMMs in FP8, but for ``keep`` blocks at each end."""

    def quantise(self, *, keep: int) -> None: ...


def loaded(
    load: Callable[..., M], model: Model, stage: Stage, settings: EngineSettings, placement: Placement
) -> M:
    """Return the module that ``load`` makes, with products in FP8 if the config says so.

    Raises ``ConfigError`` before anything is loaded if it asks for what ``require`` refuses.
    """
    settings = resolved(model, stage, settings, placement)
    require(model, stage, settings, placement)
    with nullcontext() if settings.quantization == NONE else as_stored():
        module = load(dtype=placement.dtype, device=placement.device)
    if settings.quantization == FP8:
        assert isinstance(module, Quantisable)
        with torch.inference_mode():
            module.quantise(keep=settings.unquantized_blocks)
    return module
