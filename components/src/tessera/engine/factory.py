"""Makes engines by the name of their kind; a kind is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from tessera.engine.base import TextEngine, VisionEngine, vision_of
from tessera.engine.compiled.manifest import Manifest
from tessera.engine.settings import EngineSettings
from tessera.errors import ConfigError
from tessera.models.base import Model

if TYPE_CHECKING:
    from tessera.engine.placement import Placement


def rounding(settings: EngineSettings) -> str:
    """What an engine rounds beyond its dtype: empty if nothing, else one text for engines that round alike.

    Kinds of engines are not told apart: they differ from one another by less than the dtype's own rounding.
    Raises ``ConfigError`` when the directory of a built engine cannot be read.
    """
    if settings.path is not None:
        manifest = Manifest.read(settings.path)
        if manifest.dtype != "float8":
            return ""
        # Its scales come from its own calibration, which another float8 engine need not share.
        return f"float8 {' '.join(sorted(entry.blake3 for entry in manifest.files.values()))}"
    if settings.quantization == "none":
        return ""
    return f"{settings.quantization}, {settings.unquantized_blocks} blocks kept"


# The vision and the text engine of each kind, where there is one.
_KINDS: dict[str, tuple[str, str | None]] = {
    "torch": ("tessera.engine.torch.vision:TorchVisionEngine", "tessera.engine.torch.text:TorchTextEngine"),
    "tensorrt": (
        "tessera.engine.tensorrt.vision:TensorRTVisionEngine",
        "tessera.engine.tensorrt.text:TensorRTTextEngine",
    ),
    "tensorrt_llm": ("tessera.engine.tensorrt_llm:TensorRTLLMVisionEngine", None),
    "aoti": ("tessera.engine.aoti.vision:AotiVisionEngine", "tessera.engine.aoti.text:AotiTextEngine"),
}

_Make = Callable[[Model, EngineSettings, "Placement"], object]


def make_vision_engine(model: Model, settings: EngineSettings, placement: Placement) -> VisionEngine:
    """The engine that ``settings.engine`` names, not yet warm.

    Raises ``ConfigError`` for an unknown name, and naming a family that reads text alone.
    """
    from tessera.engine.guard import GuardedVisionEngine

    vision_of(model)
    engine = cast(VisionEngine, _kind(settings, 0, "vision")(model, settings, placement))
    return GuardedVisionEngine(engine, model, placement)


def make_text_engine(model: Model, settings: EngineSettings, placement: Placement) -> TextEngine:
    """The engine that ``settings.engine`` names, not yet warm; raises ``ConfigError`` for an unknown name."""
    from tessera.engine.guard import GuardedTextEngine

    return GuardedTextEngine(cast(TextEngine, _kind(settings, 1, "text")(model, settings, placement)), model)


def _kind(settings: EngineSettings, number: int, stage: str) -> _Make:
    where = _KINDS.get(settings.engine, (None, None))[number]
    if where is None:
        known = [name for name, kinds in _KINDS.items() if kinds[number] is not None]
        raise ConfigError(f"engine {settings.engine!r} of the {stage} stage is none of: {', '.join(known)}")
    module, _, name = where.partition(":")
    return cast(_Make, getattr(import_module(module), name))
