"""The bidirectional Llama backbone over a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from tessera.models.llama_nemotron_vl.attention import varlen_attention
from tessera.models.llama_nemotron_vl.config import TextConfig
from tessera.models.llama_nemotron_vl.pooling import pool
from tessera.models.llama_nemotron_vl.rope import inverse_frequencies, rotate, rotation
from tessera.nn.activation import activation
from tessera.nn.fused import uses_fused
from tessera.nn.kernels import gemm
from tessera.nn.table import Table

if TYPE_CHECKING:
    from tessera.models.llama_nemotron_vl.text_fp8 import Fp8TextLayers


class Packing:
    """What every layer needs to know about the batch; built once for each forward pass."""

    __slots__ = ("cosines", "cu_seqlens", "lengths", "sines")

    def __init__(
        self, cu_seqlens: torch.Tensor, lengths: Sequence[int], cosines: torch.Tensor, sines: torch.Tensor
    ) -> None:
        self.cu_seqlens = cu_seqlens
        self.lengths = lengths
        self.cosines = cosines
        self.sines = sines


def wide_product(module: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """``module(rows)`` without its bias, by the faster of two libraries.

    It is for the qkv product; for those that bring the width back cuBLAS is always faster.
    """
    if len(rows) >= gemm.LEAST_ROWS and gemm.serves(module.weight):
        return gemm.product(rows, module.weight)
    return functional.linear(rows, module.weight)


class Attention(nn.Module):
    """Grouped-query attention within each sequence, with q, k and v from one product."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._head_dim = config.heads, config.kv_heads, config.head_dim
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden, width, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)

    def forward(self, hidden: torch.Tensor, packing: Packing) -> torch.Tensor:
        q, k, v = self.turned(hidden, packing.cosines, packing.sines)
        attended = varlen_attention(q, k, v, packing.cu_seqlens, packing.lengths)
        projected: torch.Tensor = self.o_proj(attended.flatten(1))
        return projected

    @property
    def counts(self) -> tuple[int, int]:
        """Heads of queries, and of keys and values."""
        return self._heads, self._kv_heads

    def turned(
        self, hidden: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Turned queries and keys, and values, each ``[..., tokens, heads, width]``."""
        heads = self.qkv_proj(hidden).unflatten(-1, (-1, self._head_dim))
        turned = rotate(heads[..., : -self._kv_heads, :], cosines, sines)
        return (
            turned[..., : self._heads, :],
            turned[..., self._heads :, :],
            heads[..., -self._kv_heads :, :],
        )

    def add_to(self, hidden: torch.Tensor, normed: torch.Tensor, packing: Packing) -> None:
        """Add the attention of ``normed`` to ``hidden`` within the output product itself."""
        attended = self.attend(wide_product(self.qkv_proj, normed), packing)
        hidden.addmm_(attended, self.o_proj.weight.t())

    def attend(self, qkv: torch.Tensor, packing: Packing) -> torch.Tensor:
        """From the one product to ``[total, heads * head_dim]``; turns the queries and keys in place."""
        from tessera.nn.kernels.rotary import rotate_in_place

        heads = qkv.view(len(qkv), -1, self._head_dim)
        turned = self._heads + self._kv_heads
        rotate_in_place(heads, turned, packing.cosines, packing.sines)
        attended = varlen_attention(
            heads[:, : self._heads],
            heads[:, self._heads : turned],
            heads[:, turned:],
            packing.cu_seqlens,
            packing.lengths,
        )
        return attended.flatten(1)


class Mlp(nn.Module):
    """A gated MLP with gate and up from one product."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self._activation = activation(config.activation)
        self.is_silu = config.activation == "silu"
        self.gate_up_proj = nn.Linear(config.hidden, 2 * config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        projected: torch.Tensor = self.down_proj(self._activation(gate) * up)
        return projected

    def add_to(self, hidden: torch.Tensor, normed: torch.Tensor) -> None:
        """Add the network of ``normed`` to ``hidden`` within the output product itself."""
        hidden.addmm_(self.gate(normed), self.down_proj.weight.t())

    def gate(self, normed: torch.Tensor) -> torch.Tensor:
        """``[total, intermediate]``, in as few passes over it as there are kernels for."""
        if self.is_silu and gemm.serves(self.gate_up_proj.weight):
            return gemm.gated(normed, self.gate_up_proj.weight)
        both = self.gate_up_proj(normed)
        if self.is_silu:
            from tessera.nn.kernels.gate import silu_gate

            return silu_gate(both)
        return self.activate(both)

    def activate(self, both: torch.Tensor) -> torch.Tensor:
        """Gate and up side by side, ``[total, 2 * intermediate]``, for any activation."""
        gate, up = both.chunk(2, dim=-1)
        return self._activation(gate) * up


class RmsNorm(nn.Module):
    """Root mean square norm, accumulated in float32 whatever the input's type."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(config.hidden))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if uses_fused(hidden.device, hidden.dtype):
            from tessera.nn.kernels.norm import rms_norm

            return rms_norm(hidden, self.weight, self.eps)
        return self.plain(hidden)

    def plain(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class Layer(nn.Module):
    """Pre-norm attention and MLP, each added to its input."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(config)
        self.mlp = Mlp(config)

    def forward(self, hidden: torch.Tensor, packing: Packing) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), packing)
        added: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return added

    def advance(self, hidden: torch.Tensor, packing: Packing) -> None:
        """The same in place and fused: the residual is never read or written by a kernel of its own."""
        self.self_attn.add_to(hidden, self.input_layernorm(hidden), packing)
        self.mlp.add_to(hidden, self.post_attention_layernorm(hidden))


class TextTower(nn.Module):
    """Implements ``tessera.models.base.TextModule``."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self._config = config
        self.embed_tokens = Table(config.vocab_size, config.hidden)
        self.stack = [Layer(config) for _ in range(config.layers)]
        self.layers = nn.ModuleList(self.stack)
        self.norm = RmsNorm(config)
        self._fp8: Fp8TextLayers | None = None
        self.frequencies: torch.Tensor

    @property
    def head_dim(self) -> int:
        return self._config.head_dim

    def quantise(self, *, keep: int) -> None:
        """Hold the products in FP8, but for ``keep`` layers at each end."""
        from tessera.models.llama_nemotron_vl.text_fp8 import Fp8TextLayers

        self._fp8 = Fp8TextLayers(self.stack, keep=keep)

    def place_constants(self, device: torch.device) -> None:
        frequencies = inverse_frequencies(self._config.rope, self._config.head_dim)
        self.register_buffer("frequencies", frequencies.to(device), persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
        vision_rows: torch.Tensor,
        vision_index: torch.Tensor,
    ) -> torch.Tensor:
        embedded = self.embed(input_ids, vision_rows, vision_index)
        return self.pooled(embedded, positions, cu_seqlens, lengths)

    def embed(
        self, input_ids: torch.Tensor, vision_rows: torch.Tensor, vision_index: torch.Tensor
    ) -> torch.Tensor:
        """Token embeddings ``[total, hidden]`` with the vision rows in their places."""
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        if vision_index.shape[0]:
            embedded.index_copy_(0, vision_index.to(torch.int64), vision_rows.to(embedded.dtype))
        return embedded

    def pooled(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
    ) -> torch.Tensor:
        """What follows the embedding; ``embedded`` may be overwritten. Float32 ``[batch, hidden]``."""
        hidden = self.encode(embedded, positions, cu_seqlens, lengths)
        return pool(hidden, cu_seqlens, self._config.pooling)

    def encode(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
    ) -> torch.Tensor:
        """The last hidden state after the final norm, ``[total, hidden]``."""
        fused = uses_fused(embedded.device, embedded.dtype)
        cosines, sines = rotation(positions, self.frequencies)
        packing = Packing(cu_seqlens, lengths, cosines, sines)
        hidden = embedded
        if self._fp8 is not None:
            self._fp8.advance(hidden, packing)
        elif fused:
            for layer in self.stack:
                layer.advance(hidden, packing)
        else:
            for layer in self.stack:
                hidden = layer(hidden, packing)
        normed: torch.Tensor = self.norm(hidden)
        return normed
