"""The bidirectional Llama backbone over a packed batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from tessera.models.llama_nemotron_vl.activation import activation
from tessera.models.llama_nemotron_vl.attention import varlen_attention
from tessera.models.llama_nemotron_vl.config import TextConfig
from tessera.models.llama_nemotron_vl.pooling import normalise, pool
from tessera.models.llama_nemotron_vl.rope import inverse_frequencies, rotate, rotation


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


class Attention(nn.Module):
    """Grouped-query attention within each sequence, with q, k and v from one product."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._head_dim = config.heads, config.kv_heads, config.head_dim
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden, width, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)

    def forward(self, hidden: torch.Tensor, packing: Packing) -> torch.Tensor:
        heads = self.qkv_proj(hidden).unflatten(-1, (-1, self._head_dim))
        turned = rotate(heads[:, : -self._kv_heads], packing.cosines, packing.sines)
        attended = varlen_attention(
            turned[:, : self._heads],
            turned[:, self._heads :],
            heads[:, -self._kv_heads :],
            packing.cu_seqlens,
            packing.lengths,
        )
        projected: torch.Tensor = self.o_proj(attended.flatten(1))
        return projected


class Mlp(nn.Module):
    """A gated MLP with gate and up from one product."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self._activation = activation(config.activation)
        self.gate_up_proj = nn.Linear(config.hidden, 2 * config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        projected: torch.Tensor = self.down_proj(self._activation(gate) * up)
        return projected


class RmsNorm(nn.Module):
    """Root mean square norm, accumulated in float32 whatever the input's type."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self._eps = config.eps
        self.weight = nn.Parameter(torch.empty(config.hidden))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self._eps)


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


class TextTower(nn.Module):
    """Implements ``tessera.models.base.TextModule``."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self._config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RmsNorm(config)
        self.frequencies: torch.Tensor

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
        hidden = self.encode(embedded, positions, cu_seqlens, lengths)
        return normalise(pool(hidden, cu_seqlens, self._config.pooling))

    def embed(
        self, input_ids: torch.Tensor, vision_rows: torch.Tensor, vision_index: torch.Tensor
    ) -> torch.Tensor:
        """Token embeddings ``[total, hidden]`` with the vision rows in their places."""
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        if vision_index.shape[0]:
            embedded.index_copy_(0, vision_index.to(torch.int64), vision_rows.to(embedded.dtype))
        return embedded

    def encode(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
    ) -> torch.Tensor:
        """The last hidden state after the final norm, ``[total, hidden]``."""
        cosines, sines = rotation(positions, self.frequencies, embedded.dtype)
        packing = Packing(cu_seqlens, lengths, cosines, sines)
        hidden = embedded
        for layer in self.layers:
            hidden = layer(hidden, packing)
        normed: torch.Tensor = self.norm(hidden)
        return normed
