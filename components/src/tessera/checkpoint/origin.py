"""Who made a checkpoint, where that was Tessera."""

from __future__ import annotations

from pathlib import Path

import tessera
from tessera.small_files import read_json


def origin(model_path: Path) -> str | None:
    """``demo`` or ``random`` for a checkpoint that Tessera brought along or made, else None.

    People must be told of both before they judge what such a model finds.
    """
    mark = read_json(model_path / "config.json").get("tessera_checkpoint")
    if mark in ("demo", "random"):
        return str(mark)
    package = Path(tessera.__file__).parent
    return "demo" if model_path.resolve().is_relative_to(package) else None
