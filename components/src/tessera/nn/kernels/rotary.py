"""A Triton kernel that turns query and key heads where they lie."""

# Triton is not installed beside the CPU builds of torch, and its kernels are not ordinary Python.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate(
    heads,
    cosines,
    sines,
    stride,
    COUNT: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, COUNT_BLOCK)[:, None]
    at = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < COUNT) & (at < HALF)
    cosine = tl.load(cosines + row * HALF + at, mask=at < HALF, other=0.0)
    sine = tl.load(sines + row * HALF + at, mask=at < HALF, other=0.0)
    first = heads + row * stride + head * 2 * HALF + at
    x = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(first + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(first, (x * cosine - y * sine).to(heads.dtype.element_ty), mask=inside)
    tl.store(first + HALF, (y * cosine + x * sine).to(heads.dtype.element_ty), mask=inside)


def rotate_in_place(heads: torch.Tensor, count: int, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Turn the first ``count`` heads of ``[total, heads, head_dim]``, whose last two axes are contiguous.

    ``cosines`` and ``sines`` are float32 ``[total, 1, head_dim / 2]``.
    """
    half = heads.shape[2] // 2
    _rotate[(heads.shape[0],)](
        heads,
        cosines,
        sines,
        heads.stride(0),
        COUNT=count,
        COUNT_BLOCK=triton.next_power_of_2(count),
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        num_warps=4,
    )
