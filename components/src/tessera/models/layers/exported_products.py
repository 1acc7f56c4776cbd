"""The products of ``gemm`` as operators that ``torch.export`` and a compiler leave alone.

Their kernels are made when they are first called, so a compiled program calls back into Python for them; when
CUDA graphs are replayed that happens while they are recorded and never again.
"""

from __future__ import annotations

import torch
from torch.library import custom_op

from tessera.models.layers import gemm

OPERATORS = ("gated_product", "gelu_product", "wide_product")

# With fewer rows cuBLAS and its own epilogue are faster.
_WIDE_ROWS = 4096


@custom_op("tessera::gated_product", mutates_args=())
def gated_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``gemm.gated``."""
    return gemm.gated(rows.contiguous(), weight)


@gated_product.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0] // 2)


@custom_op("tessera::gelu_product", mutates_args=())
def gelu_product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``gemm.gelu_tanh``."""
    if len(rows) < _WIDE_ROWS:
        return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
    return gemm.gelu_tanh(rows.contiguous(), weight, bias.float())


@gelu_product.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


@custom_op("tessera::wide_product", mutates_args=())
def wide_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``gemm.product`` without a bias."""
    if len(rows) < _WIDE_ROWS:
        return rows @ weight.t()
    return gemm.product(rows.contiguous(), weight)


@wide_product.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])
