"""Operations in half precision on CUDA: Triton kernels, and products with what follows in their epilogue.

The residual is never read or written by a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tessera.errors import ConfigError
from tessera.nn.forms.plain import GELU_TANH, Form, Heads, Residual, Rows, activation_function, tensor
from tessera.nn.kernels import attention as kernel
from tessera.nn.kernels import flash, gate, gemm, mean, norm, patches, rotary, rows
from tessera.nn.layer import LayerNorm, Linear, Mlp
from tessera.nn.rotary import Rotation
from tessera.nn.sequences import Equal, Keyed, Packed, Sequences

if TYPE_CHECKING:
    from tessera.nn.layer import Attention, Block, RmsNorm
    from tessera.nn.spec import LayerSpec
    from tessera.nn.vision import PatchEmbedding


class Fused(Form):
    def require(self, spec: LayerSpec) -> None:
        # Elsewhere attention goes by the lengths on the host, which a recorded graph does not have.
        if spec.causal and not kernel.supports(spec.head_dim):
            raise ConfigError(f"there is no causal attention on CUDA for heads {spec.head_dim} wide")

    def prepare(self, block: Block) -> None:
        if isinstance(block, Mlp):
            block.pad()
        elif isinstance(block, Linear) and block.bias is not None and gemm.serves(block.weight):
            block.float_bias = block.bias.float()
        elif isinstance(block, LayerNorm):
            block.offset = torch.zeros_like(block.weight, dtype=torch.float32)

    def defers(self, linear: Linear) -> bool:
        return True

    def rms_norm(self, stream: Residual, norm_of: RmsNorm) -> Rows:
        return norm.rms_norm(stream.settled(), norm_of.weight, norm_of.eps)

    def layer_norm(self, stream: Residual, norm_of: LayerNorm) -> Rows:
        assert norm_of.offset is not None, "the norm has not been prepared"
        rows_in, weight, bias = stream.settled(), norm_of.weight, norm_of.bias
        return norm.layer_norm(rows_in, norm_of.offset, weight, bias, norm_of.eps)

    def product(self, linear: Linear, rows_in: Rows) -> torch.Tensor:
        given = tensor(rows_in)
        if len(given) >= gemm.LEAST_ROWS and gemm.serves(linear.weight):
            return gemm.product(given, linear.weight, linear.float_bias)
        return functional.linear(given, linear.weight, linear.bias)

    def activated(self, linear: Linear, rows_in: Rows, activation: str) -> Rows:
        given = tensor(rows_in)
        if linear.float_bias is not None and len(given) >= gemm.LEAST_ROWS:
            return gemm.activated(given, linear.weight, linear.float_bias, activation)
        if activation in GELU_TANH and linear.bias is not None:
            # The product applies it on its way out: 0.53 ms instead of 0.48 and 0.19 at 32 tiles.
            return torch._addmm_activation(linear.bias, given, linear.weight.t(), use_gelu=True)
        return activation_function(activation)(functional.linear(given, linear.weight, linear.bias))

    def gated(self, linear: Linear, rows_in: Rows, activation: str) -> Rows:
        given = tensor(rows_in)
        if activation == "silu" and linear.bias is None and gemm.serves(linear.weight):
            return gemm.gated(given, linear.weight)
        both = functional.linear(given, linear.weight, linear.bias)
        return gate.silu_gate(both) if activation == "silu" else gate_by(activation, both)

    def add_product(self, stream: Residual, linear: Linear, rows_in: Rows) -> None:
        onto, given = stream.rows, tensor(rows_in)
        if len(given) >= gemm.ADDED_ROWS and gemm.adds(linear.weight):
            gemm.add_product(onto, given, linear.weight)
        else:
            onto.addmm_(given, linear.weight.t())
        if linear.bias is not None and not linear.deferred:
            onto.add_(linear.bias)

    def add(self, stream: Residual, added: torch.Tensor) -> None:
        stream.rows.add_(added)

    def add_weighted(
        self, stream: Residual, table: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> None:
        rows.add_weighted_rows(stream.rows, table, index, weights)

    def rotated(self, heads: torch.Tensor, attention: Attention, rotation: Rotation | None) -> Heads:
        q_norm, k_norm = attention.q_norm, attention.k_norm
        if rotation is None:
            return super().rotated(heads, attention, None)
        cosines, sines = rotation.cosines, rotation.sines
        if q_norm is not None and k_norm is not None:
            rotary.norm_and_rotate_in_place(
                heads,
                attention.heads,
                attention.kv_heads,
                q_norm.weight,
                k_norm.weight,
                q_norm.eps,
                cosines,
                sines,
            )
        else:
            rotary.rotate_in_place(heads, attention.heads + attention.kv_heads, cosines, sines)
        q, k, v = attention.split(heads)
        return rotation.scaled(q), k, v

    def packed(self, cu_seqlens: torch.Tensor, lengths: Sequence[int]) -> Sequences:
        return FusedPacked(cu_seqlens, lengths)

    def keyed(self, cu_seqlens: torch.Tensor, lengths: Sequence[int], keys: torch.Tensor) -> Sequences:
        return FusedKeyed(cu_seqlens, lengths, keys)

    def equal(self, length: int) -> Sequences:
        return FusedEqual(length)

    def patches(self, pixels: torch.Tensor, embedding: PatchEmbedding) -> torch.Tensor:
        if pixels.dtype != torch.uint8:
            return super().patches(pixels, embedding)
        dtype = embedding.projection.weight.dtype
        whole = pixels.flatten(1)
        if whole.shape[1] == len(embedding.mean):
            return patches.normalised_rows(whole.contiguous(), embedding.mean, embedding.std, dtype=dtype)
        return patches.normalised_patches(
            pixels, embedding.mean, embedding.std, patch=embedding.patch, dtype=dtype
        )


FUSED = Fused()


class FusedPacked(Packed):
    """Attention by FlashAttention 4 where sequences are known to be long, else by a kernel of our own.

    While a graph is recorded, the bounds have room for more sequences than there are ``lengths``, of which
    the only one bounds the longest.
    """

    __slots__ = ("_typical",)

    def __init__(self, cu_seqlens: torch.Tensor, lengths: Sequence[int]) -> None:
        super().__init__(cu_seqlens, lengths)
        known = len(lengths) == cu_seqlens.shape[0] - 1
        self._typical = flash.typical(lengths) if known else 0.0

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        width = q.shape[2]
        if self._typical >= flash.least(width) and flash.serves(q):
            return flash.flash_attention(q, k, v, self.cu_seqlens, causal=causal)
        longest = max(self.lengths)
        if not (kernel.supports(width) or kernel.pads(width, longest)):
            return super().attend(q, k, v, causal=causal)
        return kernel.packed_attention(q, k, v, self.cu_seqlens, longest, causal=causal)

    def mean(self, rows_in: torch.Tensor) -> torch.Tensor:
        return mean.segment_mean(rows_in, self.cu_seqlens)


class FusedKeyed(Keyed):
    """Attention by the kernel of our own, to fewer keys than rows."""

    __slots__ = ()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        assert not causal
        return kernel.packed_attention(q, k, v, self.cu_seqlens, max(self.lengths), seen=self.keys)


class FusedEqual(Equal):
    """Attention by cuDNN."""

    __slots__ = ()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        width = q.shape[2]
        if width % 8 or width > 128 or q.shape[1] != k.shape[1]:
            return super().attend(q, k, v, causal=causal)
        queries, keys, values = (x.view(-1, self.length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        # Called by name: which kernel scaled_dot_product_attention picks is a setting of the whole process.
        # 32 tiles of SigLIP on an H100: 0.45 ms here, 0.72 ms with FlashAttention 2.
        attended = torch.ops.aten._scaled_dot_product_cudnn_attention(
            queries, keys, values, None, False, 0.0, causal
        )[0]
        found: torch.Tensor = attended.transpose(1, 2).flatten(0, 1)
        return found


def gate_by(activation: str, both: torch.Tensor) -> torch.Tensor:
    """The gate of a product that holds gate and up side by side, for any activation."""
    gate_half, up = both.chunk(2, dim=-1)
    return activation_function(activation)(gate_half) * up
