"""Grouped-query attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tessera.nn.blocks import Block, Linear, RmsNorm
from tessera.nn.forms.plain import Residual
from tessera.nn.rotary import Rotation
from tessera.nn.sequences import Sequences
from tessera.nn.spec import LayerSpec

if TYPE_CHECKING:
    from tessera.nn.forms.plain import Rows


class Attention(Block):
    """Attention within each sequence, with q, k and v from one product, in this order.

    Queries and keys go through a norm of their own if the spec has one, and are rotated if there is a
    rotation. Scores are scaled by ``head_dim ** -0.5``.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.causal = spec.causal
        self.qkv_proj = Linear(spec.hidden, spec.qkv_width, bias=spec.qkv_bias)
        self.q_norm = RmsNorm(spec.head_dim, eps=spec.eps) if spec.qk_norm else None
        self.k_norm = RmsNorm(spec.head_dim, eps=spec.eps) if spec.qk_norm else None
        self.o_proj = Linear(spec.heads * spec.head_dim, spec.hidden, bias=spec.out_bias)

    def forward(
        self, normed: Rows, stream: Residual, sequences: Sequences, rotation: Rotation | None
    ) -> None:
        """Add the attention of ``normed`` ``[tokens, hidden]`` to the stream."""
        qkv = self.qkv_proj(normed)
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, k, v = self.form.rotated(heads, self, rotation)
        attended = sequences.attend(q, k, v, causal=self.causal)
        self.o_proj.add_to(stream, attended.flatten(1))

    def split(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values in ``[tokens, heads + 2 * kv_heads, head_dim]``."""
        q, k, v = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v
