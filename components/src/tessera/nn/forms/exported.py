"""Operations for programs that ``torch.export`` traces for CUDA and a compiler takes apart again.

What the compiler does worse than a kernel is an operator that it leaves alone. On Hopper, where ``gemm``
serves, these are the products with what follows them, as in the fused form; the norms are left to compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tessera.nn.forms.plain import GELU_TANH, Form, Heads, Rows, tensor
from tessera.nn.kernels import exported_products as products
from tessera.nn.kernels import gemm
from tessera.nn.layer import Mlp
from tessera.nn.rotary import Rotation
from tessera.nn.sequences import Masked, Sequences

if TYPE_CHECKING:
    from tessera.nn.forms.plain import Residual
    from tessera.nn.layer import Attention, Block, LayerNorm, Linear


class Exported(Form):
    """``max_sequences`` bounds the sequences of a packed batch."""

    def __init__(self, max_sequences: int) -> None:
        self._search = 1 << (max_sequences - 1).bit_length()

    def prepare(self, block: Block) -> None:
        if isinstance(block, Mlp):
            block.pad()

    def defers(self, linear: Linear) -> bool:
        return gemm.serves(linear.weight)

    def layer_norm(self, stream: Residual, norm: LayerNorm) -> Rows:
        if norm.offset is None:
            return super().layer_norm(stream, norm)
        return products.offset_layer_norm(stream.rows, norm.offset, norm.weight, norm.bias, norm.eps)

    def product(self, linear: Linear, rows: Rows) -> torch.Tensor:
        if not gemm.serves(linear.weight):
            return super().product(linear, rows)
        if linear.bias is None:
            return products.wide_product(tensor(rows), linear.weight)
        return products.biased_product(tensor(rows), linear.weight, linear.bias)

    def activated(self, linear: Linear, rows: Rows, activation: str) -> Rows:
        if activation not in GELU_TANH or linear.bias is None:
            return super().activated(linear, rows, activation)
        if gemm.serves(linear.weight):
            return products.gelu_product(tensor(rows), linear.weight, linear.bias)
        # A compiler would add the activation as a kernel of its own; the product can apply it on its way out.
        found: torch.Tensor = torch.ops.aten._addmm_activation(
            linear.bias, tensor(rows), linear.weight.t(), use_gelu=True
        )
        return found

    def gated(self, linear: Linear, rows: Rows, activation: str) -> Rows:
        if activation != "silu" or linear.bias is not None or not gemm.serves(linear.weight):
            return super().gated(linear, rows, activation)
        return products.gated_product(tensor(rows), linear.weight)

    def add_product(self, stream: Residual, linear: Linear, rows: Rows) -> None:
        if not gemm.serves(linear.weight):
            super().add_product(stream, linear, rows)
            return
        wide = gemm.ADDED_ROWS if gemm.adds(linear.weight) else 0
        products.add_product(stream.rows, tensor(rows), linear.weight, wide)
        if linear.bias is not None and not linear.deferred:
            self.add(stream, linear.bias)

    def rotated(self, heads: torch.Tensor, attention: Attention, rotation: Rotation | None) -> Heads:
        if rotation is None or not gemm.serves(attention.qkv_proj.weight):
            return super().rotated(heads, attention, rotation)
        # A compiler would rotate in float32 memory, with cosines computed anew in every layer.
        cosines, sines = rotation.cosines, rotation.sines
        q_norm, k_norm = attention.q_norm, attention.k_norm
        counts = attention.heads, attention.kv_heads
        if q_norm is not None and k_norm is not None:
            products.norm_and_rotate(heads, *counts, q_norm.weight, k_norm.weight, q_norm.eps, cosines, sines)
        else:
            products.rotate(heads, sum(counts), cosines, sines)
        q, k, v = attention.split(heads)
        return rotation.scaled(q), k, v

    def packed(self, cu_seqlens: torch.Tensor, lengths: Sequence[int]) -> Sequences:
        return ExportedPacked(cu_seqlens, self._search)

    def equal(self, length: int) -> Sequences:
        from tessera.nn.forms.fused import FusedEqual

        return FusedEqual(length)


class ExportedPacked(Masked):
    """Attention by the fused kernel, with bounds that the host does not know.

    ``search`` is a power of two, at least the number of sequences.
    """

    __slots__ = ("_search",)

    def __init__(self, cu_seqlens: torch.Tensor, search: int) -> None:
        super().__init__(cu_seqlens)
        self._search = search

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        from tessera.nn.kernels import exported_ops
        from tessera.nn.kernels.attention import supports

        if not supports(q.shape[2]):
            return super().attend(q, k, v, causal=causal)
        if gemm.serves(q):
            return products.attention(q, k, v, self.cu_seqlens, causal)
        attended: torch.Tensor = exported_ops.packed_attention(q, k, v, self.cu_seqlens, self._search, causal)
        return attended

    def mean(self, rows: torch.Tensor) -> torch.Tensor:
        from tessera.nn.kernels import exported_ops

        means: torch.Tensor = exported_ops.segment_mean(rows, self.cu_seqlens)
        return means
