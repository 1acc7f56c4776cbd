"""The products of ``gemm`` as operators that ``torch.export`` and a compiler leave alone.

Their kernels are made when they are first called, so a compiled program calls back into Python for them; when
CUDA graphs are replayed that happens while they are recorded and never again.
"""

from __future__ import annotations

import torch
from torch.library import custom_op

from tessera.nn.kernels import gemm

OPERATORS = ("gated_product", "gelu_product", "biased_product", "attention_product", "add_product")


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
    if len(rows) < gemm.LEAST_ROWS:
        return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
    return gemm.gelu_tanh(rows.contiguous(), weight, bias.float())


@gelu_product.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


@custom_op("tessera::biased_product", mutates_args=())
def biased_product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``gemm.product``."""
    if len(rows) < gemm.LEAST_ROWS:
        return torch.addmm(bias, rows, weight.t())
    return gemm.product(rows.contiguous(), weight, bias.float())


@biased_product.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


@custom_op("tessera::offset_layer_norm", mutates_args=())
def offset_layer_norm(
    rows: torch.Tensor, offset: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """``norm_kernels.layer_norm``; a compiler would read rows of more than 1024 numbers twice."""
    from tessera.nn.kernels.norm import layer_norm

    return layer_norm(rows.contiguous(), offset.contiguous(), weight, bias, eps)


@offset_layer_norm.register_fake
def _(
    rows: torch.Tensor, offset: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


@custom_op("tessera::attention_product", mutates_args=())
def attention_product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    cu_seqlens: torch.Tensor,
    heads: int,
    kv_heads: int,
) -> torch.Tensor:
    """From normed rows to ``[tokens, heads * width]`` within each sequence, as without a compiler.

    A compiler would turn queries and keys in float32 memory, with cosines computed anew in every layer.
    """
    from tessera.nn.kernels.attention import packed_attention
    from tessera.nn.kernels.rotary import rotate_in_place

    rows = rows.contiguous()
    qkv = rows @ weight.t() if len(rows) < gemm.LEAST_ROWS else gemm.product(rows, weight)
    split = qkv.view(len(rows), heads + 2 * kv_heads, -1)
    turned = heads + kv_heads
    rotate_in_place(split, turned, cosines.contiguous(), sines.contiguous())
    attended = packed_attention(
        split[:, :heads], split[:, heads:turned], split[:, turned:], cu_seqlens.contiguous(), len(rows)
    )
    return attended.flatten(1)


@attention_product.register_fake
def _(
    rows: torch.Tensor,
    weight: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    cu_seqlens: torch.Tensor,
    heads: int,
    kv_heads: int,
) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0] // (heads + 2 * kv_heads) * heads)


@custom_op("tessera::add_product", mutates_args=("onto",))
def add_product(onto: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, wide_rows: int) -> None:
    """``onto += rows @ weight.T`` within the product; by ``gemm`` from ``wide_rows`` rows on, if not 0.

    A compiler would write the product, and read and write the sum in the norm that follows.
    """
    if wide_rows and len(rows) >= wide_rows:
        gemm.add_product(onto, rows.contiguous(), weight)
    else:
        onto.addmm_(rows, weight.t())


@add_product.register_fake
def _(onto: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, wide_rows: int) -> None:
    return None
