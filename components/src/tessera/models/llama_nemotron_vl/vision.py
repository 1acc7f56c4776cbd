"""The SigLIP encoder: tiles in, patch features out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from tessera.models.llama_nemotron_vl.config import ImageConfig, ModelConfig, VisionConfig
from tessera.models.llama_nemotron_vl.projector import Projector
from tessera.nn.activation import activation
from tessera.nn.fused import uses_fused
from tessera.nn.kernels import gemm
from tessera.nn.table import Table

if TYPE_CHECKING:
    from tessera.models.llama_nemotron_vl.vision_fp8 import Fp8VisionLayers
    from tessera.nn.kernels.fp8 import Quantised

# Products whose width is a multiple of this run at full rate. At 32 tiles on an H100 the two products of
# the MLP take 1.01 ms with 4352 columns and 1.04 ms with 4304. The heads are left as they are: 72 padded
# to 80 makes attention 0.03 ms faster and the products around it 0.06 ms slower.
_MLP_MULTIPLE = 128
# From so many rows on, the attention's output product, too, is faster without cuBLAS.
ADDED_ROWS = 8192


class Embeddings(nn.Module):
    """Patches as one matrix product, plus a learned position for each."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._grid, self._patch = config.grid, config.patch_size
        self.patch_embedding = nn.Linear(config.patch_features, config.hidden)
        self.position_embedding = Table(config.grid**2, config.hidden)
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

    def start(self, tiles: torch.Tensor) -> torch.Tensor:
        """The same fused, ``[n * patches, hidden]``, without the bias of the patch embedding."""
        from tessera.nn.kernels.patches import normalised_patches

        weight = self.position_embedding.weight
        pixels = normalised_patches(tiles, self.mean, self.std, patch=self._patch, dtype=weight.dtype)
        return weight.repeat(len(tiles), 1).addmm_(pixels, self.patch_embedding.weight.t())


class Attention(nn.Module):
    """Full attention over one tile's patches, with q, k and v from one product."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._heads = config.heads
        self._width = config.hidden // config.heads
        self.qkv_proj = nn.Linear(config.hidden, 3 * config.hidden)
        self.out_proj = nn.Linear(config.hidden, config.hidden)
        self._wide_bias: torch.Tensor | None = None

    def prepare(self) -> None:
        """Choose the products' kernels, and lay the weights out for them."""
        if gemm.serves(self.qkv_proj.weight):
            self._wide_bias = self.qkv_proj.bias.float()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(hidden)
        attended = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        projected: torch.Tensor = self.out_proj(attended)
        return projected

    def split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of ``[n, patches, hidden]``, each ``[n, heads, patches, width]``."""
        return self.heads(self.qkv_proj(hidden))

    def heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same from the one product, ``[n, patches, 3 * heads * width]``."""
        parts = qkv.view(*qkv.shape[:2], 3, self._heads, -1)
        q, k, v = (x.transpose(1, 2) for x in parts.unbind(2))
        return q, k, v

    def add_to(self, hidden: torch.Tensor, normed: torch.Tensor, patches: int) -> None:
        """Add the attention of ``normed``, but for the output's bias, to ``hidden``."""
        attended = self.attend(self._qkv(normed), patches)
        if self._wide_bias is not None and len(hidden) >= ADDED_ROWS:
            gemm.add_product(hidden, attended, self.out_proj.weight)
        else:
            hidden.addmm_(attended, self.out_proj.weight.t())

    def _qkv(self, normed: torch.Tensor) -> torch.Tensor:
        if self._wide_bias is not None and len(normed) >= gemm.LEAST_ROWS:
            return gemm.product(normed, self.qkv_proj.weight, self._wide_bias)
        return linear(normed, self.qkv_proj.weight, self.qkv_proj.bias)

    def attend(self, qkv: torch.Tensor, patches: int) -> torch.Tensor:
        """From the one product to ``[n * patches, hidden]``."""
        q, k, v = (x.transpose(1, 2) for x in qkv.view(-1, patches, 3, self._heads, self._width).unbind(2))
        if self._width % 8 == 0 and self._width <= 128:
            # Called by name: which kernel the function below picks is a setting of the whole process.
            # 32 tiles on an H100: 0.45 ms here, 0.72 ms with FlashAttention 2.
            attended = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)[0]
        else:
            attended = scaled_dot_product_attention(q, k, v)
        flat: torch.Tensor = attended.transpose(1, 2).reshape(len(qkv), -1)
        return flat


class Mlp(nn.Module):
    """Two products with an activation between them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._activation = activation(config.activation)
        self.is_gelu_tanh = config.activation in ("gelu_new", "gelu_pytorch_tanh")
        self.fc1 = nn.Linear(config.hidden, config.intermediate)
        self.fc2 = nn.Linear(config.intermediate, config.hidden)
        self._wide_bias: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.fc2(self._activation(self.fc1(hidden)))
        return projected

    def prepare(self) -> None:
        """Pad the inner width with zeros, which every activation here maps to zero; choose kernels."""
        missing = -self.fc1.out_features % _MLP_MULTIPLE
        for module, name, padding in (
            (self.fc1, "weight", (0, 0, 0, missing)),
            (self.fc1, "bias", (0, missing)),
            (self.fc2, "weight", (0, missing)),
        ):
            wide = pad(getattr(module, name), padding)
            setattr(module, name, nn.Parameter(wide, requires_grad=False))
        self.fc1.out_features = self.fc2.in_features = self.fc1.out_features + missing
        if self.is_gelu_tanh and gemm.serves(self.fc1.weight):
            self._wide_bias = self.fc1.bias.float()

    def quantised(self, wide: torch.Tensor) -> Quantised:
        """The activation of ``[n * patches, intermediate]``, in FP8."""
        from tessera.nn.kernels import fp8

        if self.is_gelu_tanh:
            return fp8.gelu_tanh(wide)
        return fp8.quantise(self._activation(wide))

    def add_to(self, hidden: torch.Tensor, normed: torch.Tensor) -> None:
        """Add the network of ``normed``, but for the output's bias, to ``hidden``."""
        if self._wide_bias is not None and len(normed) >= gemm.LEAST_ROWS:
            wide = gemm.gelu_tanh(normed, self.fc1.weight, self._wide_bias)
        elif self.is_gelu_tanh:
            # The product applies it on its way out: 0.53 ms instead of 0.48 and 0.19 at 32 tiles.
            wide = torch._addmm_activation(self.fc1.bias, normed, self.fc1.weight.t(), use_gelu=True)
        else:
            wide = self._activation(linear(normed, self.fc1.weight, self.fc1.bias))
        hidden.addmm_(wide, self.fc2.weight.t())


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

    def advance(self, hidden: torch.Tensor, offsets: torch.Tensor, patches: int) -> None:
        """The same in place and fused; ``offsets`` float32 ``[2, hidden]`` is what ``hidden`` lacks."""
        self.self_attn.add_to(hidden, _norm(hidden, offsets[0], self.layer_norm1), patches)
        self.mlp.add_to(hidden, _norm(hidden, offsets[1], self.layer_norm2))


def _norm(hidden: torch.Tensor, offset: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    from tessera.nn.kernels.norm import layer_norm

    return layer_norm(hidden, offset, norm.weight, norm.bias, norm.eps)


class Encoder(nn.Module):
    """The layers that the selected feature needs, and the final norm if it is the last hidden state."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = nn.Module()
        self.layers = [Layer(config) for _ in range(config.layers_used)]
        self.encoder.layers = nn.ModuleList(self.layers)
        self.post_layernorm = nn.LayerNorm(config.hidden, eps=config.eps) if config.final_norm else None
        self._patches = config.grid**2
        self.offsets: torch.Tensor | None = None
        self._fp8: Fp8VisionLayers | None = None

    def quantise(self, *, keep: int) -> None:
        """Hold the layers' products in FP8, but for ``keep`` layers at each end."""
        from tessera.models.llama_nemotron_vl.vision_fp8 import Fp8VisionLayers

        self._fp8 = Fp8VisionLayers(self.layers, keep=keep)

    def prepare(self) -> None:
        """Lay the weights out for the fused form.

        The biases of the products that add to the residual are the same for every row. Their running
        sums, float32 ``[2 * layers + 1, hidden]``, are added where the residual is read.
        """
        biases = [self.embeddings.patch_embedding.bias.float()]
        for layer in self.layers:
            layer.mlp.prepare()
            layer.self_attn.prepare()
            biases += [layer.self_attn.out_proj.bias.float(), layer.mlp.fc2.bias.float()]
        self.offsets = torch.stack(biases).cumsum(0)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """uint8 ``[n, channels, size, size]`` to ``[n, patches, hidden]``."""
        if self.offsets is not None:
            return self._fused(tiles, self.offsets)
        hidden: torch.Tensor = self.embeddings(tiles)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden if self.post_layernorm is None else self.post_layernorm(hidden)

    def _fused(self, tiles: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        hidden = self.embeddings.start(tiles)
        if self._fp8 is not None:
            self._fp8.advance(hidden, offsets, self._patches)
        else:
            for number, layer in enumerate(self.layers):
                layer.advance(hidden, offsets[2 * number : 2 * number + 2], self._patches)
        if self.post_layernorm is None:
            hidden = hidden + offsets[-1].to(hidden.dtype)
        else:
            hidden = _norm(hidden, offsets[-1], self.post_layernorm)
        return hidden.view(len(tiles), self._patches, -1)


class VisionTower(nn.Module):
    """Encoder and projector: uint8 tiles to ``[n, tokens_per_tile, hidden]`` in the module's type."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.vision = Encoder(config.vision)
        self.projector = Projector(
            config.projector, vision_hidden=config.vision.hidden, text_hidden=config.text.hidden
        )

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Called once the weights are in place."""
        if uses_fused(device, dtype):
            self.vision.prepare()

    def quantise(self, *, keep: int) -> None:
        """Hold the encoder's products in FP8, but for ``keep`` layers at each end and the projector."""
        self.vision.quantise(keep=keep)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.projector(self.vision(tiles))
        return rows
