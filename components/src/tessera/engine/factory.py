"""Engine kinds by name; an engine's own imports happen only when it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from tessera.engine.base import TextEngine, VisionEngine
from tessera.engine.config import EngineConfig
from tessera.errors import ConfigError
from tessera.models.base import Model

if TYPE_CHECKING:
    from tessera.engine.torch_device import Placement


# The vision and the text engine of each kind.
_KINDS = {
    "torch": ("tessera.engine.torch_vision:TorchVisionEngine", "tessera.engine.torch_text:TorchTextEngine"),
    "tensorrt": (
        "tessera.engine.tensorrt_vision:TensorRTVisionEngine",
        "tessera.engine.tensorrt_text:TensorRTTextEngine",
    ),
    "aoti": ("tessera.engine.aoti_vision:AotiVisionEngine", "tessera.engine.aoti_text:AotiTextEngine"),
}


def make_vision_engine(model: Model, config: EngineConfig, placement: Placement) -> VisionEngine:
    from tessera.engine.guard import GuardedVisionEngine

    return GuardedVisionEngine(cast(VisionEngine, _kind(config, 0)(model, config, placement)))


def make_text_engine(model: Model, config: EngineConfig, placement: Placement) -> TextEngine:
    from tessera.engine.guard import GuardedTextEngine

    return GuardedTextEngine(cast(TextEngine, _kind(config, 1)(model, config, placement)))


def _kind(config: EngineConfig, stage: int) -> Callable[[Model, EngineConfig, Placement], object]:
    if config.engine not in _KINDS:
        raise ConfigError(f"engine {config.engine!r} is none of: {', '.join(_KINDS)}")
    module, _, name = _KINDS[config.engine][stage].partition(":")
    return cast("Callable[[Model, EngineConfig, Placement], object]", getattr(import_module(module), name))
