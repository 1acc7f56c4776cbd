"""The kinds of engines that are built ahead of time, found as ``tessera.engines``."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tessera.engine.kind import EngineKind, lazy, quantization
from tessera.engine.settings import EngineSettings

ENGINE_CONFIGS: Final = Path(__file__).parent / "engine_configs"
"""Engine configs of built engines: ``<family>/<kind>.yaml``."""


def rounding(settings: EngineSettings) -> str:
    """Return what the built engine at ``settings.path`` rounds beyond its dtype, as ``EngineKind`` has it.

    Raises ``ConfigError`` when its directory cannot be read.
    """
    from tessera_engines.compiled.manifest import Manifest

    if settings.path is None:
        return quantization(settings)
    manifest = Manifest.read(settings.path)
    if manifest.dtype != "float8":
        return ""
    # Its scales come from its own calibration, which another float8 engine need not share.
    return f"float8 {' '.join(sorted(entry.blake3 for entry in manifest.files.values()))}"


AOTI: Final = EngineKind(
    make_vision=lazy("tessera_engines.aoti.vision:AotiVisionEngine"),
    make_text=lazy("tessera_engines.aoti.text:AotiTextEngine"),
    rounding=rounding,
    configs=ENGINE_CONFIGS,
)

TENSORRT: Final = EngineKind(
    make_vision=lazy("tessera_engines.tensorrt.vision:TensorRTVisionEngine"),
    make_text=lazy("tessera_engines.tensorrt.text:TensorRTTextEngine"),
    rounding=rounding,
    configs=ENGINE_CONFIGS,
)

TENSORRT_LLM: Final = EngineKind(
    make_vision=lazy("tessera_engines.tensorrt_llm:TensorRTLLMVisionEngine"), rounding=rounding
)
