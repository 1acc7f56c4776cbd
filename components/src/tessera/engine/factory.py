"""Makes engines by the name of their kind; a kind is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from tessera.engine.base import TextEngine, VisionEngine
from tessera.engine.compiled.manifest import Manifest
from tessera.engine.config import EngineConfig
from tessera.errors import ConfigError
from tessera.models.base import Model

if TYPE_CHECKING:
    from tessera.engine.placement import Placement


def rounding(config: EngineConfig) -> str:
    """What an engine rounds beyond its dtype: empty if nothing, else one text for engines that round alike.

    Kinds of engines are not told apart: they differ from one another by less than the dtype's own rounding.
    Raises ``ConfigError`` when the directory of a built engine cannot be read.
    """
    if config.path is not None:
        manifest = Manifest.read(config.path)
        if manifest.dtype != "float8":
            return ""
        # Its scales come from its own calibration, which another float8 engine need not share.
        return f"float8 {' '.join(sorted(entry.blake3 for entry in manifest.files.values()))}"
    if config.quantization == "none":
        return ""
    return f"{config.quantization}, {config.unquantized_blocks} blocks kept"


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

_Make = Callable[[Model, EngineConfig, "Placement"], object]


def make_vision_engine(model: Model, config: EngineConfig, placement: Placement) -> VisionEngine:
    """The engine that ``config.engine`` names, not yet warm; raises ``ConfigError`` for an unknown name."""
    from tessera.engine.guard import GuardedVisionEngine

    return GuardedVisionEngine(cast(VisionEngine, _kind(config, 0, "vision")(model, config, placement)))


def make_text_engine(model: Model, config: EngineConfig, placement: Placement) -> TextEngine:
    """The engine that ``config.engine`` names, not yet warm; raises ``ConfigError`` for an unknown name."""
    from tessera.engine.guard import GuardedTextEngine

    return GuardedTextEngine(cast(TextEngine, _kind(config, 1, "text")(model, config, placement)))


def _kind(config: EngineConfig, number: int, stage: str) -> _Make:
    where = _KINDS.get(config.engine, (None, None))[number]
    if where is None:
        known = [name for name, kinds in _KINDS.items() if kinds[number] is not None]
        raise ConfigError(f"engine {config.engine!r} of the {stage} stage is none of: {', '.join(known)}")
    module, _, name = where.partition(":")
    return cast(_Make, getattr(import_module(module), name))
