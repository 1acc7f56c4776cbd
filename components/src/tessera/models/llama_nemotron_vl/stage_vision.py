"""The vision stage for compilers: tiles in, rows out, sizes open."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from tessera.models.llama_nemotron_vl.config import VisionConfig
from tessera.models.llama_nemotron_vl.vision import ADDED_ROWS, Attention, Layer, Mlp, VisionTower
from tessera.nn.fused import uses_fused
from tessera.nn.kernels import exported_products, gemm


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
        if self._tanh and gemm.serves(weight):
            hidden = self._called(encoder.layers, hidden)
        else:
            for layer in encoder.layers:
                hidden = self._layer(layer, hidden)
        if encoder.post_layernorm is not None:
            hidden = encoder.post_layernorm(hidden)
        projected: torch.Tensor = self.tower.projector(hidden)
        return projected

    def _called(self, layers: Sequence[Layer], hidden: torch.Tensor) -> torch.Tensor:
        """All layers with their sums inside products, as the engine without a compiler runs them on Hopper.

        The biases of these products are the same for every row: their running sums are added as it is read.
        """
        shape = hidden.shape
        rows = hidden.flatten(0, 1)
        biases: list[torch.Tensor] = [
            bias for layer in layers for bias in (layer.self_attn.out_proj.bias, layer.mlp.fc2.bias)
        ]
        offsets = torch.stack(biases).float().cumsum(0)
        for number, layer in enumerate(layers):
            first = layer.layer_norm1
            normed = _norm(first, rows, offsets[2 * number - 1]) if number else first(rows)
            product = layer.self_attn.qkv_proj
            qkv = exported_products.biased_product(normed, product.weight, product.bias)
            attended = _attended(*layer.self_attn.heads(qkv.view(*shape[:-1], -1))).flatten(0, 1)
            exported_products.add_product(rows, attended, layer.self_attn.out_proj.weight, ADDED_ROWS)
            normed = _norm(layer.layer_norm2, rows, offsets[2 * number])
            wide = exported_products.gelu_product(normed, layer.mlp.fc1.weight, layer.mlp.fc1.bias)
            exported_products.add_product(rows, wide, layer.mlp.fc2.weight, 0)
        return (rows + offsets[-1]).to(rows.dtype).view(shape)

    def _layer(self, layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + _attend(layer.self_attn, layer.layer_norm1(hidden))
        return hidden + self._mlp(layer.mlp, layer.layer_norm2(hidden))

    def _mlp(self, mlp: Mlp, normed: torch.Tensor) -> torch.Tensor:
        if not self._tanh:
            plain: torch.Tensor = mlp(normed)
            return plain
        # A compiler would add the activation as a kernel of its own; the product can apply it on its way out.
        rows = normed.flatten(0, 1)
        wide = torch.ops.aten._addmm_activation(mlp.fc1.bias, rows, mlp.fc1.weight.t(), use_gelu=True)
        return linear(wide, mlp.fc2.weight, mlp.fc2.bias).view(normed.shape)


def _norm(norm: nn.LayerNorm, rows: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = exported_products.offset_layer_norm(rows, offset, norm.weight, norm.bias, norm.eps)
    return normed


def _attend(attention: Attention, normed: torch.Tensor) -> torch.Tensor:
    projected: torch.Tensor = attention.out_proj(_attended(*attention.split(normed)))
    return projected


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if q.shape[-1] % 8 == 0 and q.shape[-1] <= 128:
        # By name, as the engine without a compiler does: the function below picks a slower kernel.
        attended = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)[0]
    else:
        attended = scaled_dot_product_attention(q, k, v)
    rows: torch.Tensor = attended.transpose(1, 2).flatten(2)
    return rows
