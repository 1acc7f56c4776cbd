"""The vision stage for compilers: tiles in, rows out, sizes open."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from tessera.models.layers import exported_products, gemm
from tessera.models.layers.fused import uses_fused
from tessera.models.llama_nemotron_vl.config import VisionConfig
from tessera.models.llama_nemotron_vl.vision import Attention, Layer, Mlp, VisionTower


class VisionStage(nn.Module):
    """uint8 ``[tiles, channels, size, size]`` to ``[tiles, tokens_per_tile, hidden]``."""

    def __init__(self, tower: VisionTower, config: VisionConfig) -> None:
        super().__init__()
        self.tower = tower
        self._tanh = config.activation in ("gelu_new", "gelu_pytorch_tanh")

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        weight = self.tower.vision.embeddings.position_embedding.weight
        if not uses_fused(weight.device, weight.dtype):
            rows: torch.Tensor = self.tower(tiles)
            return rows
        encoder = self.tower.vision
        hidden: torch.Tensor = encoder.embeddings(tiles)
        for layer in encoder.layers:
            hidden = self._layer(layer, hidden)
        if encoder.post_layernorm is not None:
            hidden = encoder.post_layernorm(hidden)
        projected: torch.Tensor = self.tower.projector(hidden)
        return projected

    def _layer(self, layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + _attend(layer.self_attn, layer.layer_norm1(hidden))
        return hidden + self._mlp(layer.mlp, layer.layer_norm2(hidden))

    def _mlp(self, mlp: Mlp, normed: torch.Tensor) -> torch.Tensor:
        if not self._tanh:
            plain: torch.Tensor = mlp(normed)
            return plain
        # A compiler would add the activation as a kernel of its own; the product can apply it on its way out.
        rows = normed.flatten(0, 1)
        if gemm.serves(mlp.fc1.weight):
            wide = exported_products.gelu_product(rows, mlp.fc1.weight, mlp.fc1.bias)
        else:
            wide = torch.ops.aten._addmm_activation(mlp.fc1.bias, rows, mlp.fc1.weight.t(), use_gelu=True)
        return linear(wide, mlp.fc2.weight, mlp.fc2.bias).view(normed.shape)


def _attend(attention: Attention, normed: torch.Tensor) -> torch.Tensor:
    q, k, v = attention.split(normed)
    if q.shape[-1] % 8 == 0 and q.shape[-1] <= 128:
        # By name, as the engine without a compiler does: the function below picks a slower kernel.
        attended = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)[0]
    else:
        attended = scaled_dot_product_attention(q, k, v)
    projected: torch.Tensor = attention.out_proj(attended.transpose(1, 2).flatten(2))
    return projected
