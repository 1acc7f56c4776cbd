"""What an engine rounds beyond its number type, so that kept results of one are not taken for another's."""

from __future__ import annotations

from tessera.engine.compiled.manifest import Manifest
from tessera.engine.config import EngineConfig


def rounding(config: EngineConfig) -> str:
    """Empty where products are in the number type itself, else the same text for engines that round alike.

    Kinds of engines are not told apart: they differ by less than the type does from what it rounds. Raises
    ``ConfigError`` when the directory of a built engine cannot be read.
    """
    if config.path is not None:
        manifest = Manifest.read(config.path)
        if manifest.dtype != "float8":
            return ""
        # Its steps come from what it was calibrated with, of which no other engine need know.
        return f"float8 {' '.join(sorted(entry.blake3 for entry in manifest.files.values()))}"
    if config.quantization == "none":
        return ""
    return f"{config.quantization}, {config.unquantized_blocks} blocks kept"
