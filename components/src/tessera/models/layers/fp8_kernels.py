"""Triton kernels that end in FP8: e4m3 with one scale for each row, made while the row is at hand."""

# Triton is not installed beside the CPU builds of torch, and its kernels are not ordinary Python.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

# The largest finite e4m3 number.
_MAX = tl.constexpr(448.0)


@triton.jit
def _store_row(x, inside, at, row, out, scales, WIDTH: tl.constexpr):
    largest = tl.max(tl.abs(tl.where(inside, x, 0.0)), 0)
    scale = tl.maximum(largest, 1e-12) / _MAX
    tl.store(scales + row, scale)
    tl.store(out + row * WIDTH + at, (x / scale).to(tl.float8e4nv), mask=inside)


@triton.jit
def _add_rms_norm(
    rows, added, weight, out, scales, eps, ADD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = tl.load(rows + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(added + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(rows.dtype.element_ty)
        tl.store(rows + row * WIDTH + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    _store_row(x * scale * w, inside, at, row, out, scales, WIDTH)


@triton.jit
def _add_layer_norm(
    rows,
    added,
    offset,
    weight,
    bias,
    out,
    scales,
    eps,
    ADD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = tl.load(rows + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(added + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(rows.dtype.element_ty)
        tl.store(rows + row * WIDTH + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    x += tl.load(offset + at, mask=inside, other=0.0)
    mean = tl.sum(x, 0) / WIDTH
    centred = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    _store_row(centred * scale * w + b, inside, at, row, out, scales, WIDTH)


@triton.jit
def _silu_gate(both, out, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(both + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    _store_row(gate * tl.sigmoid(gate) * up, inside, at, row, out, scales, WIDTH)


@triton.jit
def _gelu_tanh(rows, out, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = tl.load(rows + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    # x * (1 + tanh(y)) / 2 is x * sigmoid(2 y)
    x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    _store_row(x, inside, at, row, out, scales, WIDTH)


@triton.jit
def _quantise(rows, out, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = tl.load(rows + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    _store_row(x, inside, at, row, out, scales, WIDTH)


Quantised = tuple[torch.Tensor, torch.Tensor]
"""e4m3 ``[total, width]`` and float32 ``[total, 1]``, by which each row is to be multiplied."""


def _empty(total: int, width: int, device: torch.device) -> Quantised:
    return (
        torch.empty(total, width, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(total, 1, dtype=torch.float32, device=device),
    )


def add_rms_norm(
    rows: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> Quantised:
    """``rows += added``, in place, and the norm of that; contiguous ``[total, width]``."""
    total, width = rows.shape
    out, scales = _empty(total, width, rows.device)
    _add_rms_norm[(total,)](
        rows,
        rows if added is None else added,
        weight,
        out,
        scales,
        eps,
        ADD=added is not None,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
    return out, scales


def add_layer_norm(
    rows: torch.Tensor,
    added: torch.Tensor | None,
    offset: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> Quantised:
    """``rows += added``, in place, and the norm of that ``+ offset``; offset float32 ``[width]``."""
    total, width = rows.shape
    out, scales = _empty(total, width, rows.device)
    _add_layer_norm[(total,)](
        rows,
        rows if added is None else added,
        offset,
        weight,
        bias,
        out,
        scales,
        eps,
        ADD=added is not None,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
    return out, scales


def silu_gate(both: torch.Tensor) -> Quantised:
    """Gate and up side by side, contiguous ``[total, 2 * width]``, to ``silu(gate) * up``."""
    total, width = both.shape[0], both.shape[1] // 2
    out, scales = _empty(total, width, both.device)
    _silu_gate[(total,)](both, out, scales, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=8)
    return out, scales


def gelu_tanh(rows: torch.Tensor) -> Quantised:
    """GELU in its tanh form of contiguous ``[total, width]``."""
    total, width = rows.shape
    out, scales = _empty(total, width, rows.device)
    _gelu_tanh[(total,)](rows, out, scales, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=8)
    return out, scales


def quantise(rows: torch.Tensor) -> Quantised:
    """Contiguous ``[total, width]`` as it is."""
    total, width = rows.shape
    out, scales = _empty(total, width, rows.device)
    _quantise[(total,)](rows, out, scales, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4)
    return out, scales
