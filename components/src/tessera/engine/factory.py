"""Makes engines by the name of their kind, guarded, and not yet warm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.engine.base import TextEngine, VisionEngine, vision_of
from tessera.engine.kind import kind_of, kinds
from tessera.engine.settings import EngineSettings
from tessera.errors import ConfigError
from tessera.kernel_caches import keep_kernels
from tessera.models.base import Model

if TYPE_CHECKING:
    from tessera.engine.placement import Placement


def rounding(settings: EngineSettings) -> str:
    """What an engine rounds beyond its dtype, as its kind's ``rounding`` has it.

    Raises ``ConfigError`` when the directory of a built engine cannot be read.
    """
    kind = kind_of(settings.engine)
    return kind.rounding(settings) if kind is not None else ""


def make_vision_engine(model: Model, settings: EngineSettings, placement: Placement) -> VisionEngine:
    """The engine that ``settings.engine`` names, not yet warm.

    Raises ``ConfigError`` for an unknown name, and naming a family that reads text alone.
    """
    from tessera.engine.guard import GuardedVisionEngine

    vision_of(model)
    _keep_kernels(placement)
    kind = kind_of(settings.engine)
    if kind is None or kind.make_vision is None:
        raise _unknown(settings.engine, "vision", [n for n, k in kinds().items() if k.make_vision])
    return GuardedVisionEngine(kind.make_vision(model, settings, placement), model, placement)


def make_text_engine(model: Model, settings: EngineSettings, placement: Placement) -> TextEngine:
    """The engine that ``settings.engine`` names, not yet warm; raises ``ConfigError`` for an unknown name."""
    from tessera.engine.guard import GuardedTextEngine

    _keep_kernels(placement)
    kind = kind_of(settings.engine)
    if kind is None or kind.make_text is None:
        raise _unknown(settings.engine, "text", [n for n, k in kinds().items() if k.make_text])
    return GuardedTextEngine(kind.make_text(model, settings, placement), model)


def _keep_kernels(placement: Placement) -> None:
    if placement.is_cuda:
        keep_kernels()


def _unknown(name: str, stage: str, known: list[str]) -> ConfigError:
    return ConfigError(f"engine {name!r} of the {stage} stage is none of: {', '.join(known)}")
