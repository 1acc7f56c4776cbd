"""The text stage for compilers, whole and in its three parts, over padded and over packed batches.

A padded batch holds one sequence in each row, padded on the right; ``attention_mask`` is 1 for a token and 0
for padding, and every row has at least one token. ``vision_map`` says for each token which vision row
takes its place, -1 for none, so that nothing has to look for the places.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn.functional import embedding, pad, scaled_dot_product_attention

from tessera.models.llama_nemotron_vl.config import Pooling
from tessera.models.llama_nemotron_vl.rope import rotation
from tessera.models.llama_nemotron_vl.text import Layer, TextTower
from tessera.nn.fused import FUSED_HEAD_DIMS, uses_fused
from tessera.nn.kernels import exported_products, gemm

_EPSILON = 1e-12


class Embed(nn.Module):
    """Token embeddings with the vision rows in their places."""

    def __init__(self, tower: TextTower) -> None:
        super().__init__()
        self.embed_tokens = tower.embed_tokens

    def forward(
        self, input_ids: torch.Tensor, vision_rows: torch.Tensor, vision_map: torch.Tensor
    ) -> torch.Tensor:
        """int32 ``[...]``, ``[..., hidden]`` and int32 ``[...]`` to ``[..., hidden]``; at least one row."""
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        rows = vision_rows.flatten(0, -2).to(embedded.dtype)
        placed = embedding(vision_map.clamp(min=0), rows)
        return torch.where((vision_map >= 0).unsqueeze(-1), placed, embedded)


class PaddedLayers(nn.Module):
    """The layers and the final norm over a padded batch."""

    def __init__(self, tower: TextTower) -> None:
        super().__init__()
        self.layers = tower.layers
        self._stack = cast(list[Layer], list(tower.layers))
        self.norm = tower.norm
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", tower.frequencies, persistent=False)

    def forward(self, embedded: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """``[sequences, tokens, hidden]`` and int32 ``[sequences, tokens]`` to the former's shape."""
        mask = (attention_mask != 0)[:, None, None, :]
        positions = torch.arange(embedded.shape[1], device=embedded.device)
        cosines, sines = rotation(positions, self.frequencies)
        hidden = embedded
        for layer in self._stack:
            q, k, v = layer.self_attn.turned(layer.input_layernorm.plain(hidden), cosines, sines)
            hidden = hidden + layer.self_attn.o_proj(_attend(q, k, v, mask).flatten(-2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm.plain(hidden))
        normed: torch.Tensor = self.norm.plain(hidden)
        return normed


class PaddedPool(nn.Module):
    """Pooling and L2 over a padded batch."""

    def __init__(self, pooling: Pooling) -> None:
        super().__init__()
        self._pooling = pooling

    def forward(
        self, hidden: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 unit vectors ``[sequences, hidden]`` and float32 ``[sequences]``, the lengths they had."""
        return unit(self._pool(hidden, attention_mask))

    def _pool(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask != 0
        if self._pooling == "cls":
            return hidden[:, 0].float()
        if self._pooling == "last":
            positions = torch.arange(hidden.shape[1], device=hidden.device)
            last = torch.where(mask, positions, 0).amax(1)
            return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2])).squeeze(1).float()
        # Chosen, not multiplied by zero: what padding holds must not matter even if it is no number.
        sums = torch.where(mask[..., None], hidden.float(), 0.0).sum(1)
        return sums / mask.sum(1, dtype=torch.float32)[:, None]


class PaddedText(nn.Module):
    """The whole text stage over a padded batch."""

    def __init__(self, tower: TextTower, pooling: Pooling) -> None:
        super().__init__()
        self.embed = Embed(tower)
        self.lm = PaddedLayers(tower)
        self.post = PaddedPool(pooling)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        vision_rows: torch.Tensor,
        vision_map: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.embed(input_ids, vision_rows, vision_map)
        vectors, norms = self.post(self.lm(embedded, attention_mask), attention_mask)
        return vectors, norms


class PackedText(nn.Module):
    """The whole text stage over a packed batch; ``ends`` says behind which token each sequence ends.

    On CUDA in half precision attention and the mean are the fused kernels. Elsewhere attention is over the
    whole batch with a mask, which costs its square and lets a sequence that is no number spoil the others:
    good for comparisons and small batches, not for a service.

    ``max_sequences`` bounds the sequences of a batch on CUDA.
    """

    def __init__(self, tower: TextTower, pooling: Pooling, *, max_sequences: int) -> None:
        super().__init__()
        self.embed = Embed(tower)
        self.layers = tower.layers
        self._stack = cast(list[Layer], list(tower.layers))
        self.norm = tower.norm
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", tower.frequencies, persistent=False)
        self._pooling = pooling
        weight = tower.norm.weight
        self._fused = uses_fused(weight.device, weight.dtype)
        self.fused_attention = self._fused and tower.head_dim in FUSED_HEAD_DIMS
        if self._fused:
            # A compiled program looks these operators up by name.
            import tessera.nn.kernels.exported_ops  # noqa: F401
        self._search = 1 << (max_sequences - 1).bit_length()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        ends: torch.Tensor,
        vision_rows: torch.Tensor,
        vision_map: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden: torch.Tensor = self.embed(input_ids, vision_rows, vision_map)
        cosines, sines = rotation(positions, self.frequencies)
        tokens = torch.arange(input_ids.shape[0], device=input_ids.device)
        # Tokens behind the last bound count as one more sequence.
        sequence = (tokens[:, None] >= ends[None, :]).sum(1)
        cu_seqlens = pad(ends, (1, 0))
        for layer in self._stack:
            hidden = self._layer(layer, hidden, cosines, sines, cu_seqlens, sequence)
        return unit(self._pool(self.norm.plain(hidden), cu_seqlens, sequence))

    def _layer(
        self,
        layer: Layer,
        hidden: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        cu_seqlens: torch.Tensor,
        sequence: torch.Tensor,
    ) -> torch.Tensor:
        if self.fused_attention and gemm.serves(layer.self_attn.qkv_proj.weight):
            return self._called(layer, hidden, cosines, sines, cu_seqlens)
        q, k, v = layer.self_attn.turned(layer.input_layernorm.plain(hidden), cosines, sines)
        if self.fused_attention:
            from tessera.nn.kernels.exported_ops import packed_attention

            attended = packed_attention(q, k, v, cu_seqlens, self._search)
        else:
            mask = (sequence[:, None] == sequence)[None, None]
            attended = _attend(q[None], k[None], v[None], mask).squeeze(0)
        hidden = hidden + layer.self_attn.o_proj(attended.flatten(-2))
        added: torch.Tensor = hidden + layer.mlp(layer.post_attention_layernorm.plain(hidden))
        return added

    def _called(
        self,
        layer: Layer,
        hidden: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        cu_seqlens: torch.Tensor,
    ) -> torch.Tensor:
        """The layer as the engine without a compiler runs it on Hopper, which leaves the norms to compile."""
        attention, mlp = layer.self_attn, layer.mlp
        normed = layer.input_layernorm.plain(hidden)
        attended = exported_products.attention_product(
            normed, attention.qkv_proj.weight, cosines, sines, cu_seqlens, *attention.counts
        )
        exported_products.add_product(hidden, attended, attention.o_proj.weight, 0)
        normed = layer.post_attention_layernorm.plain(hidden)
        if mlp.is_silu:
            gated = exported_products.gated_product(normed, mlp.gate_up_proj.weight)
        else:
            gated = mlp.activate(mlp.gate_up_proj(normed))
        exported_products.add_product(hidden, gated, mlp.down_proj.weight, 0)
        return hidden

    def _pool(self, hidden: torch.Tensor, cu_seqlens: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
        if self._pooling == "cls":
            return hidden.index_select(0, cu_seqlens[:-1]).float()
        if self._pooling == "last":
            return hidden.index_select(0, cu_seqlens[1:] - 1).float()
        if self._fused:
            from tessera.nn.kernels.exported_ops import segment_mean

            mean: torch.Tensor = segment_mean(hidden, cu_seqlens)
            return mean
        sums = torch.zeros(cu_seqlens.shape[0], hidden.shape[1], dtype=torch.float32, device=hidden.device)
        return sums.index_add(0, sequence, hidden.float())[:-1] / cu_seqlens.diff()[:, None]


def unit(pooled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 rows scaled to length 1, and their lengths; a row shorter than 1e-12 is divided by that."""
    norms = pooled.square().sum(-1).sqrt()
    return pooled / norms.clamp(min=_EPSILON)[:, None], norms


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``[sequences, tokens, heads, head_dim]``, fewer heads of keys; ``mask`` is true where one may look."""
    groups = q.shape[2] // k.shape[2]
    queries, keys, values = (x.transpose(1, 2) for x in (q, _repeat(k, groups), _repeat(v, groups)))
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask).transpose(1, 2)


def _repeat(heads: torch.Tensor, groups: int) -> torch.Tensor:
    batch, tokens, count, width = heads.shape
    return heads[:, :, :, None].expand(batch, tokens, count, groups, width).flatten(2, 3)
