"""The words that the tools add to the command ``tessera``; nothing here imports a tool."""

from __future__ import annotations

from typing import Final

from tessera.command import Command

BENCH: Final = Command("load a running service and measure it", "tessera_tools.bench")
CHECKPOINT: Final = Command(
    "write a checkpoint with random weights", "tessera_tools.random_checkpoint.checkpoint"
)
SIZING: Final = Command("how many workers a mix of traffic needs, and what they cost", "tessera_tools.sizing")
