"""The word that built engines add to the command ``tessera``; nothing here imports an engine."""

from __future__ import annotations

from typing import Final

from tessera.command import Command

ENGINE: Final = Command(
    "build engines ahead of time, look into them, export stages, quantize checkpoints", "tessera_engines.cli"
)
