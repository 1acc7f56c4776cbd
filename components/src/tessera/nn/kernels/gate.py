"""A Triton kernel for the gate of a SwiGLU network."""

# Triton is not installed beside the CPU builds of torch, and its kernels are not ordinary Python.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _silu_gate(both, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(both + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_gate(both: torch.Tensor) -> torch.Tensor:
    """Gate and up side by side, contiguous ``[total, 2 * width]``, to ``silu(gate) * up``."""
    total, width = both.shape[0], both.shape[1] // 2
    out = torch.empty(total, width, dtype=both.dtype, device=both.device)
    block = min(2048, triton.next_power_of_2(width))
    _silu_gate[(total, triton.cdiv(width, block))](both, out, WIDTH=width, BLOCK=block, num_warps=8)
    return out
