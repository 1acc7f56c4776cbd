"""Libraries for Hopper GPUs, which the extra ``cuda`` brings; everything runs without them."""

from __future__ import annotations

import functools

import torch

from tessera.extras import absent

QUACK, FLASH_ATTENTION = "quack", "flash_attn.cute"


@functools.cache
def serves(library: str, device: torch.device) -> bool:
    """Whether ``library`` is installed and ``device`` is of the generation that it is for."""
    return _is_hopper(device) and not absent(library)


def missing(device: torch.device) -> tuple[str, ...]:
    """Return the distributions that ``device`` would run faster with and that are not installed."""
    known = {"quack-kernels": QUACK, "flash-attn-4": FLASH_ATTENTION}
    if not _is_hopper(device):
        return ()
    return tuple(name for name, library in known.items() if absent(library))


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
