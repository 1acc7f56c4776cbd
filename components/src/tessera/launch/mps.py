"""NVIDIA's Multi-Process Service for workers that share a card.

Without it a card gives its processes turns and never runs kernels of two at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tessera.launch.processes import without
from tessera.machine import Card

COMMAND: Final = ("nvidia-cuda-mps-control", "-f")
"""In the foreground it is a child like the others, and ends with them."""


def wanted(mode: str, shared: bool, cards: Sequence[Card], environment: Mapping[str, str]) -> bool:
    """Whether the service is to be started, for workers that share a card of the machine's or do not.

    ``mode`` is ``auto`` (where a card has several workers and the service is installed), ``on`` or
    ``off``. A service that runs already is used as it is.
    """
    if mode == "off" or environment.get("CUDA_MPS_PIPE_DIRECTORY"):
        return False
    if mode == "on":
        return True
    # Parts of a card that is cut up (MIG) would need a service for each.
    if not (shared and cards) or any(card.name.startswith("MIG") for card in cards):
        return False
    from shutil import which

    return which(COMMAND[0]) is not None


def of_service(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The service's own environment; it and the workers meet in the folder.

    Cards that are hidden from the service would be counted without them in the workers' variable.
    """
    return without(environment, ("CUDA_VISIBLE_DEVICES",)) | of_workers(folder)


def of_workers(folder: Path) -> dict[str, str]:
    """What workers find the service by."""
    return dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), str(folder))
