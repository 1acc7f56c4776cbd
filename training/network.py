"""The model while it learns: the service's own modules, run by plain differentiable operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from tessera.models.llama_nemotron_vl import attention as served
from tessera.models.llama_nemotron_vl.config import ModelConfig
from tessera.models.llama_nemotron_vl.rope import rotate, rotation
from tessera.models.llama_nemotron_vl.text import Attention, Layer, Mlp, RmsNorm, TextTower
from tessera.models.llama_nemotron_vl.vision import VisionTower

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_STORED_PREFIXES = (
    ("vision.vision.", "vision_model.vision_model."),
    ("vision.projector.", "mlp1."),
    ("text.", "language_model."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """A packed batch of prompts, all tensors on the network's device.

    ``ids`` and ``positions`` are int32 ``[total]``, ``bounds`` int32 ``[sequences + 1]`` and ``lengths`` the
    same on the host. ``tiles`` int64 lists the tiles whose rows replace the placeholders, in the order in
    which these occur, and ``placeholders`` int64 where they stand.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    bounds: torch.Tensor
    lengths: Sequence[int]
    tiles: torch.Tensor
    placeholders: torch.Tensor


class Network(nn.Module):
    """Both towers and the temperature; parameters are float32, the arithmetic whatever autocast says.

    ``temperature`` is where that begins: cosines are divided by it in the loss.
    """

    def __init__(self, config: ModelConfig, *, temperature: float = 0.07) -> None:
        super().__init__()
        self._config = config
        self.vision = VisionTower(config)
        self.text = TextTower(config.text)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / temperature)))
        self._initialise()

    @property
    def scale(self) -> torch.Tensor:
        """What cosines are multiplied with in the loss, 100 at most."""
        return self.log_scale.clamp(max=math.log(100.0)).exp()

    def place(self, device: torch.device) -> Network:
        self.to(device)
        self.vision.vision.embeddings.place_constants(self._config.image, device)
        self.text.place_constants(device)
        return self

    def forward(self, tiles: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """uint8 ``[n, 3, size, size]`` and prompts about them to unit vectors ``[sequences, hidden]``."""
        rows: torch.Tensor = self.vision(tiles)
        embedded: torch.Tensor = self.text.embed_tokens(sequences.ids)
        placed = rows[sequences.tiles].flatten(0, 1).to(embedded.dtype)
        hidden = embedded.index_copy(0, sequences.placeholders, placed)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        turns = rotation(sequences.positions, self.text.frequencies)
        for layer in self.text.layers:
            assert isinstance(layer, Layer)
            hidden = hidden + _attend(layer.self_attn, _norm(layer.input_layernorm, hidden), sequences, turns)
            hidden = hidden + _gated(layer.mlp, _norm(layer.post_attention_layernorm, hidden))
        return functional.normalize(_mean(_norm(self.text.norm, hidden), sequences), dim=-1)

    def stored(self) -> dict[str, torch.Tensor]:
        """Every weight under the name and in the shape in which checkpoints hold it."""
        found: dict[str, torch.Tensor] = {}
        for name, value in self.state_dict().items():
            for own, prefix in _STORED_PREFIXES:
                if name.startswith(own):
                    found |= self._unfused(prefix + name.removeprefix(own), value)
        return found

    @torch.no_grad()
    def load_stored(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take every weight from a checkpoint's tensors; ``KeyError`` names one that is missing."""
        for name, part in self.stored().items():
            part.copy_(tensors[name])

    def _unfused(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        if name.endswith("patch_embedding.weight"):
            vision = self._config.vision
            return {name: value.view(-1, vision.channels, vision.patch_size, vision.patch_size)}
        for fused, parts in _FUSED.items():
            if f".{fused}." in name:
                pieces = torch.split(value, self._rows(fused, name, value))
                names = [name.replace(f".{fused}.", f".{part}.") for part in parts]
                return dict(zip(names, pieces, strict=True))
        return {name: value}

    def _rows(self, fused: str, name: str, value: torch.Tensor) -> list[int]:
        if fused == "qkv_proj" and name.startswith("language_model."):
            text = self._config.text
            return [text.heads * text.head_dim] + 2 * [text.kv_heads * text.head_dim]
        return len(_FUSED[fused]) * [len(value) // len(_FUSED[fused])]

    def _initialise(self) -> None:
        """Unit variance through every product, and residual branches that begin small."""
        depth = {"vision.vision": self._config.vision.layers, "text": self._config.text.layers}
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                deviation = module.in_features**-0.5
                if name.endswith(("out_proj", "fc2", "o_proj", "down_proj")):
                    tower = "text" if name.startswith("text") else "vision.vision"
                    deviation /= math.sqrt(2 * depth[tower])
                nn.init.normal_(module.weight, std=deviation)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.5)
            elif isinstance(module, RmsNorm):
                nn.init.ones_(module.weight)


def _norm(norm: RmsNorm, hidden: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(hidden, norm.weight.shape, norm.weight.to(hidden.dtype), norm.eps)


def _attend(
    attention: Attention,
    normed: torch.Tensor,
    sequences: Sequences,
    turns: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    heads = attention.qkv_proj(normed).unflatten(-1, (-1, attention._head_dim))
    turned = rotate(heads[:, : -attention._kv_heads], *turns)
    q, k = turned[:, : attention._heads], turned[:, attention._heads :]
    v = heads[:, -attention._kv_heads :]
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        groups = attention._heads // attention._kv_heads
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        longest = max(sequences.lengths)
        bounds = sequences.bounds
        # The service's kernels have no backward pass; this one has, and takes half precision only.
        found = varlen_attn(q.contiguous(), k, v, bounds, bounds, longest, longest)
        attended = found if isinstance(found, torch.Tensor) else found[0]
    else:
        attended = served.varlen_attention(q, k, v, sequences.bounds, sequences.lengths)
    projected: torch.Tensor = attention.o_proj(attended.flatten(1))
    return projected


def _gated(mlp: Mlp, normed: torch.Tensor) -> torch.Tensor:
    gate, up = mlp.gate_up_proj(normed).chunk(2, dim=-1)
    projected: torch.Tensor = mlp.down_proj(mlp._activation(gate) * up)
    return projected


def _mean(hidden: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """The mean over each sequence in float32, ``[sequences, hidden]``."""
    lengths = sequences.bounds.diff()
    owner = torch.arange(len(lengths), device=hidden.device).repeat_interleave(
        lengths, output_size=len(hidden)
    )
    sums = torch.zeros(len(lengths), hidden.shape[1], device=hidden.device)
    return sums.index_add(0, owner, hidden.float()) / lengths[:, None]
