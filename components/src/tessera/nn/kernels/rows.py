"""A Triton kernel that adds rows of a table to rows of a batch where they lie."""

# Triton is not installed beside the CPU builds of torch, and its kernels are not ordinary Python.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_weighted(
    onto, table, index, weights, total, TAPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    found = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        source = tl.load(index + tap * total + row).to(tl.int64)
        weight = tl.load(weights + tap * total + row)
        found += weight * tl.load(table + source * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    found += tl.load(onto + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(onto + row * WIDTH + at, found.to(onto.dtype.element_ty), mask=inside)


def add_weighted_rows(
    onto: torch.Tensor, table: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> None:
    """``onto[i] += sum over taps of weights[tap, i] * table[index[tap, i]]``, rounded once.

    ``onto`` ``[total, width]`` and ``table`` ``[rows, width]`` are contiguous, ``index`` is int32 and
    ``weights`` float32, both contiguous ``[taps, total]``. The interpolated position embedding of a ViT is
    the case of four taps.
    """
    total, width = onto.shape
    _add_weighted[(total,)](
        onto,
        table,
        index,
        weights,
        total,
        TAPS=index.shape[0],
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
