"""When the fused forms are used: half precision on a CUDA device. Everything else runs plain torch."""

from __future__ import annotations

import functools
import importlib.util

import torch

FUSED_HEAD_DIMS = (16, 32, 64, 128)
"""Head widths that the packed attention kernel takes."""


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; torch's CPU wheels come without it."""
    return importlib.util.find_spec("triton") is not None


def uses_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether modules of this type on this device run the fused forms."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and has_triton()
