"""The backbone's layers with their products in FP8; norms, attention and the residual stay bfloat16."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.models.llama_nemotron_vl.text import Layer, Packing
from tessera.nn.fp8 import Fp8Weight
from tessera.nn.kernels import fp8


class Fp8TextLayers:
    """All layers in order, the inner ones quantised; takes their weights over."""

    def __init__(self, layers: Sequence[Layer], *, keep: int) -> None:
        inner = range(keep, len(layers) - keep)
        self._layers = [_Fp8Layer(layer) if number in inner else layer for number, layer in enumerate(layers)]

    def advance(self, hidden: torch.Tensor, packing: Packing) -> None:
        """Run them over ``hidden`` in place."""
        # What an FP8 layer adds is added by the next one's norm, which reads the residual anyway.
        pending: torch.Tensor | None = None
        for layer in self._layers:
            if isinstance(layer, _Fp8Layer):
                pending = layer.advance(hidden, pending, packing)
                continue
            if pending is not None:
                hidden.add_(pending)
                pending = None
            layer.advance(hidden, packing)
        if pending is not None:
            hidden.add_(pending)


class _Fp8Layer:
    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._qkv = Fp8Weight.taken_from(layer.self_attn.qkv_proj)
        self._out = Fp8Weight.taken_from(layer.self_attn.o_proj)
        self._gate_up = Fp8Weight.taken_from(layer.mlp.gate_up_proj)
        self._down = Fp8Weight.taken_from(layer.mlp.down_proj)

    def advance(self, hidden: torch.Tensor, pending: torch.Tensor | None, packing: Packing) -> torch.Tensor:
        """Add ``pending`` to ``hidden`` and return what is to be added next."""
        attention, mlp = self._layer.self_attn, self._layer.mlp
        before, between = self._layer.input_layernorm, self._layer.post_attention_layernorm
        normed = fp8.add_rms_norm(hidden, pending, before.weight, before.eps)
        attended = attention.attend(self._qkv.product(normed), packing)
        pending = self._out.product(fp8.quantise(attended))
        normed = fp8.add_rms_norm(hidden, pending, between.weight, between.eps)
        both = self._gate_up.product(normed)
        gated = fp8.silu_gate(both) if mlp.is_silu else fp8.quantise(mlp.activate(both))
        return self._down.product(gated)
