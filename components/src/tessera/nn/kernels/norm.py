"""Triton kernels for the two norms: one read and one write of the rows, accumulated in float32."""

# Triton is not installed beside the CPU builds of torch, and its kernels are not ordinary Python.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm(rows, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = tl.load(rows + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, (x * scale * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm(rows, offset, weight, bias, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = tl.load(rows + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(offset + at, mask=inside, other=0.0)
    mean = tl.sum(x, 0) / WIDTH
    centred = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, (centred * scale * w + b).to(out.dtype.element_ty), mask=inside)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Contiguous ``[total, width]`` to the same shape and type."""
    out = torch.empty_like(rows)
    width = rows.shape[1]
    _rms_norm[(rows.shape[0],)](
        rows, weight, out, eps, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4
    )
    return out


def layer_norm(
    rows: torch.Tensor, offset: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Norm of ``rows + offset``; rows contiguous ``[total, width]``, offset float32 ``[width]``."""
    out = torch.empty_like(rows)
    width = rows.shape[1]
    # 28,416 rows on an H200 with 2 and 4 warps: 1024 wide 0.030 and 0.033 ms, 1152 wide 0.036 and 0.047 ms.
    # An RMS norm of 2048 or 4096 is the same with either.
    _layer_norm[(rows.shape[0],)](
        rows, offset, weight, bias, out, eps, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=2
    )
    return out
