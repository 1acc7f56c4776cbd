"""Which form a tower runs in, by its device and type."""

from __future__ import annotations

import functools
import importlib.util

import torch

from tessera.checkpoint.loading import torch_dtype
from tessera.nn.forms.plain import PLAIN, Form


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; torch's CPU wheels come without it."""
    return importlib.util.find_spec("triton") is not None


def uses_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether modules of this type on this device run fused: half precision on CUDA."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and has_triton()


def form_for(device: torch.device, dtype: torch.dtype) -> Form:
    """Fused where there are kernels for it, plain torch elsewhere."""
    if not uses_fused(device, dtype):
        return PLAIN
    from tessera.nn.forms.fused import FUSED

    return FUSED


def fp8(beside: Form, *, every: bool) -> Form:
    """Products in FP8 for layers that were prepared for the form ``beside``, by kernels where that has them.

    ``every`` takes all of their weights, not only those that are in FP8 already.
    """
    if beside is PLAIN:
        from tessera.nn.forms.rounded import Rounded

        return Rounded(every=every)
    from tessera.nn.forms.fp8 import Fp8

    return Fp8(every=every)


def exported(device: str, dtype: str, *, max_sequences: int) -> Form:
    """For programs that ``torch.export`` traces; ``max_sequences`` bounds a packed batch on CUDA."""
    if not uses_fused(torch.device(device), torch_dtype(dtype)):
        return PLAIN
    from tessera.nn.forms.exported import Exported

    return Exported(max_sequences)
