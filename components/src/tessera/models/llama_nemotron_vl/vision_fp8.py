"""The vision encoder's layers with their products in FP8; norms, attention and the residual stay bfloat16."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tessera.models.llama_nemotron_vl.vision import Layer
from tessera.nn.fp8 import Fp8Weight
from tessera.nn.kernels import fp8


class Fp8VisionLayers:
    """All layers in order, the inner ones quantised; takes their weights over."""

    def __init__(self, layers: Sequence[Layer], *, keep: int) -> None:
        inner = range(keep, len(layers) - keep)
        self._layers = [_Fp8Layer(layer) if number in inner else layer for number, layer in enumerate(layers)]

    def advance(self, hidden: torch.Tensor, offsets: torch.Tensor, patches: int) -> None:
        """Run them over ``hidden`` in place; ``offsets`` are the biases that it lacks so far."""
        pending: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            own = offsets[2 * number : 2 * number + 2]
            if isinstance(layer, _Fp8Layer):
                pending = layer.advance(hidden, pending, own, patches)
                continue
            if pending is not None:
                hidden.add_(pending)
                pending = None
            layer.advance(hidden, own, patches)
        if pending is not None:
            hidden.add_(pending)


class _Fp8Layer:
    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._qkv_bias = layer.self_attn.qkv_proj.bias
        self._qkv = Fp8Weight.taken_from(layer.self_attn.qkv_proj)
        self._out = Fp8Weight.taken_from(layer.self_attn.out_proj)
        self._fc1_bias = layer.mlp.fc1.bias
        self._fc1 = Fp8Weight.taken_from(layer.mlp.fc1)
        self._fc2 = Fp8Weight.taken_from(layer.mlp.fc2)

    def advance(
        self, hidden: torch.Tensor, pending: torch.Tensor | None, offsets: torch.Tensor, patches: int
    ) -> torch.Tensor:
        """Add ``pending`` to ``hidden`` and return what is to be added next."""
        layer = self._layer
        normed = _norm(hidden, pending, offsets[0], layer.layer_norm1)
        attended = layer.self_attn.attend(self._qkv.product(normed, self._qkv_bias), patches)
        pending = self._out.product(fp8.quantise(attended))
        normed = _norm(hidden, pending, offsets[1], layer.layer_norm2)
        wide = self._fc1.product(normed, self._fc1_bias)
        return self._fc2.product(layer.mlp.quantised(wide))


def _norm(
    hidden: torch.Tensor, pending: torch.Tensor | None, offset: torch.Tensor, norm: nn.LayerNorm
) -> fp8.Quantised:
    return fp8.add_layer_norm(hidden, pending, offset, norm.weight, norm.bias, norm.eps)
