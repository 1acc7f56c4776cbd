"""The SigLIP encoder: tiles in, patch features out."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from tessera.models.llama_nemotron_vl.activation import activation
from tessera.models.llama_nemotron_vl.config import ImageConfig, ModelConfig, VisionConfig
from tessera.models.llama_nemotron_vl.projector import Projector


class Embeddings(nn.Module):
    """Patches as one matrix product, plus a learned position for each."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._grid, self._patch = config.grid, config.patch_size
        self.patch_embedding = nn.Linear(config.patch_features, config.hidden)
        self.position_embedding = nn.Embedding(config.grid**2, config.hidden)
        self.mean: torch.Tensor
        self.std: torch.Tensor

    def place_constants(self, image: ImageConfig, device: torch.device) -> None:
        """Lay each channel's mean and deviation out along the patch features."""
        for name, values in (("mean", image.mean), ("std", image.std)):
            constants = torch.tensor(values, dtype=torch.float32, device=device)
            self.register_buffer(name, constants.repeat_interleave(self._patch**2), persistent=False)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """uint8 ``[n, channels, size, size]`` to ``[n, patches, hidden]``."""
        n, channels = tiles.shape[:2]
        grid, patch = self._grid, self._patch
        # rearranged as bytes, a quarter of the traffic that float32 would cost
        patches = tiles.reshape(n, channels, grid, patch, grid, patch).permute(0, 2, 4, 1, 3, 5)
        pixels = (patches.reshape(n, grid * grid, -1).to(torch.float32) / 255.0 - self.mean) / self.std
        weight = self.position_embedding.weight
        embedded: torch.Tensor = self.patch_embedding(pixels.to(weight.dtype))
        return embedded + weight


class Attention(nn.Module):
    """Full attention over one tile's patches, with q, k and v from one product."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._heads = config.heads
        self.qkv_proj = nn.Linear(config.hidden, 3 * config.hidden)
        self.out_proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(hidden).unflatten(-1, (3, self._heads, -1))
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        attended = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        projected: torch.Tensor = self.out_proj(attended)
        return projected


class Mlp(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._activation = activation(config.activation)
        self.fc1 = nn.Linear(config.hidden, config.intermediate)
        self.fc2 = nn.Linear(config.intermediate, config.hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.fc2(self._activation(self.fc1(hidden)))
        return projected


class Layer(nn.Module):
    """Pre-norm attention and MLP, each added to its input."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden, eps=config.eps)
        self.self_attn = Attention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden, eps=config.eps)
        self.mlp = Mlp(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.layer_norm1(hidden))
        added: torch.Tensor = hidden + self.mlp(self.layer_norm2(hidden))
        return added


class Encoder(nn.Module):
    """The layers that the selected feature needs, and the final norm if it is the last hidden state."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = nn.Module()
        self.layers = [Layer(config) for _ in range(config.layers_used)]
        self.encoder.layers = nn.ModuleList(self.layers)
        self.post_layernorm = nn.LayerNorm(config.hidden, eps=config.eps) if config.final_norm else None

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """uint8 ``[n, channels, size, size]`` to ``[n, patches, hidden]``."""
        hidden: torch.Tensor = self.embeddings(tiles)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden if self.post_layernorm is None else self.post_layernorm(hidden)


class VisionTower(nn.Module):
    """Encoder and projector: uint8 tiles to ``[n, tokens_per_tile, hidden]`` in the module's type."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.vision = Encoder(config.vision)
        self.projector = Projector(
            config.projector, vision_hidden=config.vision.hidden, text_hidden=config.text.hidden
        )

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.projector(self.vision(tiles))
        return rows
