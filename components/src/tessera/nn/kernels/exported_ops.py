"""The fused kernels as operators that ``torch.export`` keeps and a compiler takes apart again."""

# Triton is not installed beside the CPU builds of torch, and its kernels are not ordinary Python.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
from torch.library import triton_op, wrap_triton

from tessera.nn.kernels.attention import attend, tiling
from tessera.nn.kernels.mean import COLUMNS, mean
from tessera.nn.kernels.mean import ROWS as MEAN_ROWS


@triton_op("tessera::packed_attention", mutates_args={})
def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    search: int,
    causal: bool = False,
) -> torch.Tensor:
    """``attention.packed_attention`` for lengths that are not known to the host.

    ``search`` is a power of two, at least the number of sequences.
    """
    # The strides below are then the same whatever layout a compiler chooses.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    total, heads, width = q.shape
    shared = k.shape[1]
    group = heads // shared
    sequences = cu_seqlens.shape[0] - 1
    rows, keys = tiling(width, group, 1 << 30)
    out = torch.empty_like(q)
    wrap_triton(attend)[(total * group // rows + sequences, shared, 1)](
        q,
        k,
        v,
        out,
        cu_seqlens,
        cu_seqlens,
        heads * width,
        shared * width,
        shared * width,
        heads * width,
        sequences,
        GROUP=group,
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        ROWS=rows,
        KEYS=keys,
        SEARCH=search,
        CAUSAL=causal,
        num_warps=4,
        num_stages=3,
    )
    return out


@triton_op("tessera::segment_mean", mutates_args={})
def segment_mean(rows: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """``mean.segment_mean``."""
    rows = rows.contiguous()
    batch, width = cu_seqlens.shape[0] - 1, rows.shape[1]
    out = torch.empty(batch, width, dtype=torch.float32, device=rows.device)
    wrap_triton(mean)[(batch, triton.cdiv(width, COLUMNS), 1)](
        rows, cu_seqlens, out, WIDTH=width, ROWS=MEAN_ROWS, COLUMNS=COLUMNS, num_warps=4
    )
    return out
