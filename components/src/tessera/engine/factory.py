"""Engine kinds by name; an engine's own imports happen only when it is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.engine.base import TextEngine, VisionEngine
from tessera.engine.config import EngineConfig
from tessera.errors import ConfigError
from tessera.models.base import Model

if TYPE_CHECKING:
    from tessera.engine.torch_device import Placement


def _unknown(config: EngineConfig) -> ConfigError:
    return ConfigError(f"engine {config.engine!r} is none of: torch")


def make_vision_engine(model: Model, config: EngineConfig, placement: Placement) -> VisionEngine:
    if config.engine == "torch":
        from tessera.engine.torch_vision import TorchVisionEngine

        return TorchVisionEngine(model, config, placement)
    raise _unknown(config)


def make_text_engine(model: Model, config: EngineConfig, placement: Placement) -> TextEngine:
    if config.engine == "torch":
        from tessera.engine.torch_text import TorchTextEngine

        return TorchTextEngine(model, config, placement)
    raise _unknown(config)
