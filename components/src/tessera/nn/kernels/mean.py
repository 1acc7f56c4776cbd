"""A Triton kernel for the mean over each sequence of a packed batch."""

# Triton is not installed beside the CPU builds of torch, and its kernels are not ordinary Python.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 16
COLUMNS = 128


@triton.jit(do_not_specialize_on_alignment=["bounds"])
def mean(rows, bounds, out, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # The kernel of ``segment_mean``: one program for COLUMNS columns of one sequence, ROWS rows a step.
    sequence = tl.program_id(0)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < WIDTH
    start = tl.load(bounds + sequence).to(tl.int64)
    length = tl.load(bounds + sequence + 1) - start
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, length, ROWS):
        mask = (first + row < length)[:, None] & inside[None, :]
        where = rows + (start + first + row)[:, None] * WIDTH + at[None, :]
        total += tl.load(where, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + sequence * WIDTH + at, tl.sum(total, 0) / length, mask=inside)


def segment_mean(rows: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Contiguous ``[total, width]`` and int32 bounds ``[batch + 1]`` to float32 ``[batch, width]``.

    Sums are added in one fixed order, unlike the atomic additions of an indexed sum. An empty sequence
    gives NaN.
    """
    batch, width = cu_seqlens.shape[0] - 1, rows.shape[1]
    out = torch.empty(batch, width, dtype=torch.float32, device=rows.device)
    grid = (batch, triton.cdiv(width, COLUMNS))
    mean[grid](rows, cu_seqlens, out, WIDTH=width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)
    return out
