"""Triton kernels that end in FP8: e4m3 with a scale for each row, made while the row is at hand, or given."""

# Triton is not installed beside the CPU builds of torch, and its kernels are not ordinary Python.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

# The largest finite e4m3 number.
_MAX = tl.constexpr(448.0)


@triton.jit
def _store_row(x, inside, at, row, out, scales, given, GIVEN: tl.constexpr, WIDTH: tl.constexpr):
    if GIVEN:
        scale = tl.load(given)
    else:
        largest = tl.max(tl.abs(tl.where(inside, x, 0.0)), 0)
        scale = tl.maximum(largest, 1e-12) / _MAX
    tl.store(scales + row, scale)
    # What calibration has not seen lies beyond the type's numbers.
    scaled = tl.minimum(tl.maximum(x / scale, -_MAX), _MAX)
    tl.store(out + row * WIDTH + at, scaled.to(tl.float8e4nv), mask=inside)


@triton.jit
def _load_sum(rows, added, inside, at, ADD: tl.constexpr):
    x = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(rows.dtype.element_ty)
        tl.store(rows + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    return x


@triton.jit
def _add_rms_norm(
    rows,
    added,
    weight,
    out,
    scales,
    given,
    eps,
    ADD: tl.constexpr,
    GIVEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = _load_sum(rows, added, inside, row * WIDTH + at, ADD)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    _store_row(x * scale * w, inside, at, row, out, scales, given, GIVEN, WIDTH)


@triton.jit
def _add_layer_norm(
    rows,
    added,
    offset,
    weight,
    bias,
    out,
    scales,
    given,
    eps,
    ADD: tl.constexpr,
    GIVEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = _load_sum(rows, added, inside, row * WIDTH + at, ADD)
    x += tl.load(offset + at, mask=inside, other=0.0)
    mean = tl.sum(x, 0) / WIDTH
    centred = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    _store_row(centred * scale * w + b, inside, at, row, out, scales, given, GIVEN, WIDTH)


@triton.jit
def _silu_gate(both, out, scales, given, GIVEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(both + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    _store_row(gate * tl.sigmoid(gate) * up, inside, at, row, out, scales, given, GIVEN, WIDTH)


@triton.jit
def _gelu_tanh(rows, out, scales, given, GIVEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = tl.load(rows + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    # x * (1 + tanh(y)) / 2 is x * sigmoid(2 y)
    x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    _store_row(x, inside, at, row, out, scales, given, GIVEN, WIDTH)


@triton.jit
def _quantise(rows, out, scales, given, GIVEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = tl.load(rows + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    _store_row(x, inside, at, row, out, scales, given, GIVEN, WIDTH)


# Up to this width one warp holds a row in its registers.
_NARROW = 2048

Quantised = tuple[torch.Tensor, torch.Tensor]
"""e4m3 ``[total, width]`` and float32 ``[total, 1]``, by which each row is to be multiplied."""


def _launch(
    kernel: triton.JITFunction,
    width: int,
    rows: torch.Tensor,
    *others: torch.Tensor,
    scale: torch.Tensor | None,
    warps: int,
    **scalars: float,
) -> Quantised:
    """One program for each of ``rows``, each of which gives ``width`` numbers."""
    total = rows.shape[0]
    out = torch.empty(total, width, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(total, 1, dtype=torch.float32, device=rows.device)
    block = triton.next_power_of_2(width)
    given = scales if scale is None else scale
    kernel[(total,)](
        rows,
        *others,
        out,
        scales,
        given,
        **scalars,
        GIVEN=scale is not None,
        WIDTH=width,
        BLOCK=block,
        num_warps=warps,
    )
    return out, scales


def add_rms_norm(
    rows: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None = None,
) -> Quantised:
    """``rows += added``, in place, and the norm of that; contiguous ``[total, width]``.

    Here and below, ``scale`` float32 ``[]`` is that of all rows; without it each has its own.
    """
    other, add = (rows, False) if added is None else (added, True)
    width = rows.shape[1]
    return _launch(_add_rms_norm, width, rows, other, weight, scale=scale, eps=eps, ADD=add, warps=4)


def add_layer_norm(
    rows: torch.Tensor,
    added: torch.Tensor | None,
    offset: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None = None,
) -> Quantised:
    """``rows += added``, in place, and the norm of that ``+ offset``; offset float32 ``[width]``."""
    other, add = (rows, False) if added is None else (added, True)
    given = (rows, other, offset, weight, bias)
    width = rows.shape[1]
    # 28,672 rows of 1,152 on an H200 take 0.066 ms with one warp each and 0.097 with four.
    warps = 1 if width <= _NARROW else 4
    return _launch(_add_layer_norm, width, *given, scale=scale, eps=eps, ADD=add, warps=warps)


def silu_gate(both: torch.Tensor, scale: torch.Tensor | None = None) -> Quantised:
    """Gate and up side by side, contiguous ``[total, 2 * width]``, to ``silu(gate) * up``."""
    return _launch(_silu_gate, both.shape[1] // 2, both, scale=scale, warps=8)


def gelu_tanh(rows: torch.Tensor, scale: torch.Tensor | None = None) -> Quantised:
    """GELU in its tanh form of contiguous ``[total, width]``."""
    return _launch(_gelu_tanh, rows.shape[1], rows, scale=scale, warps=4)


def quantise(rows: torch.Tensor, scale: torch.Tensor | None = None) -> Quantised:
    """Contiguous ``[total, width]`` as it is."""
    return _launch(_quantise, rows.shape[1], rows, scale=scale, warps=4)
