"""A Triton kernel that norms query and key heads and turns them where they lie."""

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
    q_weight,
    k_weight,
    stride,
    eps,
    QUERIES: tl.constexpr,
    COUNT: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
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
    if NORM:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)[:, None]
        query = head < QUERIES
        q_first = tl.load(q_weight + at, mask=at < HALF, other=0.0).to(tl.float32)
        k_first = tl.load(k_weight + at, mask=at < HALF, other=0.0).to(tl.float32)
        q_second = tl.load(q_weight + HALF + at, mask=at < HALF, other=0.0).to(tl.float32)
        k_second = tl.load(k_weight + HALF + at, mask=at < HALF, other=0.0).to(tl.float32)
        x *= scale * tl.where(query, q_first, k_first)
        y *= scale * tl.where(query, q_second, k_second)
    tl.store(first, (x * cosine - y * sine).to(heads.dtype.element_ty), mask=inside)
    tl.store(first + HALF, (y * cosine + x * sine).to(heads.dtype.element_ty), mask=inside)


def _launch(
    heads: torch.Tensor,
    queries: int,
    count: int,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> None:
    half = heads.shape[2] // 2
    q_weight, k_weight = weights or (cosines, cosines)
    _rotate[(heads.shape[0],)](
        heads,
        cosines,
        sines,
        q_weight,
        k_weight,
        heads.stride(0),
        eps,
        QUERIES=queries,
        COUNT=count,
        COUNT_BLOCK=triton.next_power_of_2(count),
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        NORM=weights is not None,
        num_warps=4,
    )


def rotate_in_place(heads: torch.Tensor, count: int, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Turn the first ``count`` heads of ``[total, heads, head_dim]``, whose last two axes are contiguous.

    ``cosines`` and ``sines`` are float32 ``[total, 1, head_dim / 2]``.
    """
    _launch(heads, count, count, cosines, sines, None, 0.0)


def norm_and_rotate_in_place(
    heads: torch.Tensor,
    q_heads: int,
    kv_heads: int,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cosines: torch.Tensor,
    sines: torch.Tensor,
) -> None:
    """Root mean square norm of each query and each key head, then its rotation, in one pass.

    ``heads`` is ``[total, q_heads + kv_heads + …, head_dim]`` with the last two axes contiguous; what follows
    the keys stays as it is. ``q_weight`` and ``k_weight`` are ``[head_dim]``, ``cosines`` and ``sines``
    float32 ``[total, 1, head_dim / 2]``. Everything between reading and writing is float32.
    """
    _launch(heads, q_heads, q_heads + kv_heads, cosines, sines, (q_weight, k_weight), eps)
