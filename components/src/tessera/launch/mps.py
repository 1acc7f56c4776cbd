"""NVIDIA's Multi-Process Service for workers that share a card.

Without it a card gives its processes turns and never runs kernels of two at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tessera.launch.settings import SettingError

COMMAND: Final = ("nvidia-cuda-mps-control", "-f")
"""In the foreground it is a child like the others, and ends with them."""


def wanted(mode: str, workers: int, lists: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether the service is to be started for so many workers on the cards of these lists.

    ``mode`` is CUDA_MPS: ``auto`` (where a card has several workers and the service is installed), ``on`` or
    ``off``. An empty list is every card. A service that runs already is used as it is.

    Raises ``SettingError`` for another mode.
    """
    if mode not in ("auto", "on", "off"):
        raise SettingError(f"CUDA_MPS={mode}: is none of auto, on, off")
    if mode == "off" or environment.get("CUDA_MPS_PIPE_DIRECTORY"):
        return False
    if mode == "on":
        return True
    from shutil import which

    if which(COMMAND[0]) is None or not Path("/dev/nvidiactl").exists():
        return False
    # CUDA_VISIBLE_DEVICES= hides every card.
    if not environment.get("CUDA_VISIBLE_DEVICES", "all") and not any(lists):
        return False
    return workers > distinct_cards(lists)


def distinct_cards(lists: Sequence[str]) -> int:
    """Worker N takes entry N of its list, and without a list the first card of all."""
    return len({card for cards in lists for card in (cards or "0").split(",")})
