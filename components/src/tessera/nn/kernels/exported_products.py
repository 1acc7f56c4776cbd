"""Products of ``gemm`` and kernels beside them as operators that ``torch.export`` and a compiler leave alone.

Their kernels are made when they are first called, so a compiled program calls back into Python for them; when
CUDA graphs are replayed that happens while they are recorded and never again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
from torch.library import custom_op

from tessera.nn.kernels import gemm

P = ParamSpec("P")
T = TypeVar("T")

OPERATORS = ("wide_product", "gated_product", "gelu_product", "biased_product", "add_product")
"""Those that may run a GEMM of the library."""


def _operator(
    traced: Callable[..., torch.Tensor | None] = lambda *_: None, *, writes: str = ""
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function an operator of its name, which may write to one of its arguments.

    ``traced`` gives an empty answer of the right shape where there are no values.
    """

    def register(function: Callable[P, T]) -> Callable[P, T]:
        operator = custom_op(f"tessera::{function.__name__}", mutates_args=(writes,) if writes else ())(
            function
        )
        operator.register_fake(traced)
        return cast(Callable[P, T], operator)

    return register


def _columns(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


@_operator(_columns)
def wide_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``gemm.product`` without a bias."""
    if len(rows) < gemm.LEAST_ROWS:
        return rows @ weight.t()
    return gemm.product(rows.contiguous(), weight)


@_operator(lambda rows, weight: rows.new_empty(rows.shape[0], weight.shape[0] // 2))
def gated_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``gemm.gated``."""
    return gemm.gated(rows.contiguous(), weight)


@_operator(_columns)
def gelu_product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``gemm.activated`` by GELU in its tanh form."""
    if len(rows) < gemm.LEAST_ROWS:
        return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
    return gemm.activated(rows.contiguous(), weight, bias.float(), "gelu_pytorch_tanh")


@_operator(_columns)
def biased_product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``gemm.product``."""
    if len(rows) < gemm.LEAST_ROWS:
        return torch.addmm(bias, rows, weight.t())
    return gemm.product(rows.contiguous(), weight, bias.float())


@_operator(lambda rows, *_: torch.empty_like(rows, memory_format=torch.contiguous_format))
def offset_layer_norm(
    rows: torch.Tensor, offset: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """``norm_kernels.layer_norm``; a compiler would read rows of more than 1024 numbers twice."""
    from tessera.nn.kernels.norm import layer_norm

    return layer_norm(rows.contiguous(), offset.contiguous(), weight, bias, eps)


@_operator(writes="heads")
def rotate(heads: torch.Tensor, count: int, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """``rotary.rotate_in_place``."""
    from tessera.nn.kernels.rotary import rotate_in_place

    rotate_in_place(heads, count, cosines.contiguous(), sines.contiguous())


@_operator(writes="heads")
def norm_and_rotate(
    heads: torch.Tensor,
    q_heads: int,
    kv_heads: int,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cosines: torch.Tensor,
    sines: torch.Tensor,
) -> None:
    """``rotary.norm_and_rotate_in_place``."""
    from tessera.nn.kernels.rotary import norm_and_rotate_in_place

    cosines, sines = cosines.contiguous(), sines.contiguous()
    norm_and_rotate_in_place(heads, q_heads, kv_heads, q_weight, k_weight, eps, cosines, sines)


@_operator(lambda q, *_: q.new_empty(q.shape))
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, causal: bool
) -> torch.Tensor:
    """``attention.packed_attention`` of heads that lie in one product, for lengths the host does not know."""
    from tessera.nn.kernels.attention import packed_attention

    return packed_attention(q, k, v, cu_seqlens.contiguous(), len(q), causal=causal)


@_operator(writes="onto")
def add_product(onto: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, wide_rows: int) -> None:
    """``onto += rows @ weight.T`` within the product; by ``gemm`` from ``wide_rows`` rows on, if not 0.

    A compiler would write the product, and read and write the sum in the norm that follows.
    """
    if wide_rows and len(rows) >= wide_rows:
        gemm.add_product(onto, rows.contiguous(), weight)
    else:
        onto.addmm_(rows, weight.t())
