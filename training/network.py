"""The model while it learns: the service's own modules, run by plain differentiable operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from tessera.checkpoint.loading import stored_names
from tessera.models.llama_nemotron_vl.config import ModelConfig
from tessera.models.llama_nemotron_vl.tensors import expected
from tessera.models.llama_nemotron_vl.vision import LlamaNemotronVision
from tessera.nn.forms.plain import Form, Residual, Rows
from tessera.nn.layer import SOURCES, LayerNorm, Linear, RmsNorm, use
from tessera.nn.rotary import Rotary
from tessera.nn.sequences import Packed, grouped
from tessera.nn.spec import CHANNELS
from tessera.nn.text import TextTower

_STORED_PREFIXES = (
    ("vision.", "vision_model.vision_model."),
    ("projector.", "mlp1."),
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
        self.vision = LlamaNemotronVision(config)
        self.text = TextTower(config.text)
        use(self.text, _Learning())
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / temperature)))
        self._initialise()

    @property
    def scale(self) -> torch.Tensor:
        """What cosines are multiplied with in the loss, 100 at most."""
        return self.log_scale.clamp(max=math.log(100.0)).exp()

    def place(self, device: torch.device) -> Network:
        self.to(device)
        image, spec = self._config.image, self.text.spec
        self.vision.vision.patches.place_constants(image.mean, image.std, device)
        self.text.rotary = Rotary.of(spec.rope, spec.layer.head_dim, device)
        return self

    def forward(self, tiles: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """uint8 ``[n, 3, size, size]`` and prompts about them to unit vectors ``[sequences, hidden]``."""
        rows = self.vision.rows(tiles)
        embedded: torch.Tensor = self.text.embed_tokens(sequences.ids)
        placed = rows[sequences.tiles].flatten(0, 1).to(embedded.dtype)
        hidden = embedded.index_copy(0, sequences.placeholders, placed)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        packed = _Differentiable(sequences.bounds, sequences.lengths)
        return functional.normalize(
            packed.mean(self.text.encode((hidden,), sequences.positions[None], packed)), dim=-1
        )

    def stored(self) -> dict[str, torch.Tensor]:
        """Every weight under the name and in the shape in which checkpoints hold it."""
        found: dict[str, torch.Tensor] = {}
        for name, value in self.state_dict().items():
            if name.startswith("text."):
                found |= self._parts(stored_names(name, SOURCES), value)
            elif name.startswith("vision."):
                found |= self._parts(stored_names(name.removeprefix("vision."), self.vision.sources), value)
        return found

    @torch.no_grad()
    def load_stored(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take every weight from a checkpoint's tensors; ``KeyError`` names one that is missing."""
        for name, part in self.stored().items():
            part.copy_(tensors[name])

    def _parts(self, names: Sequence[str], value: torch.Tensor) -> dict[str, torch.Tensor]:
        """A parameter's rows under the names of what it is made of."""
        if names[0].endswith("patch_embedding.weight"):
            vision = self._config.vision
            value = value.view(-1, CHANNELS, vision.patch_size, vision.patch_size)
        shapes = expected(self._config)
        parts = torch.split(value, [shapes[name][0] for name in names])
        return {_stored(name): part for name, part in zip(names, parts, strict=True)}

    def _initialise(self) -> None:
        """Unit variance through every product, and residual branches that begin small."""
        depth = {"vision.vision": self._config.vision.layers, "text": self._config.text.layers}
        for name, module in self.named_modules():
            if isinstance(module, Linear):
                deviation = module.weight.shape[1] ** -0.5
                if name.endswith(("o_proj", "down_proj")):
                    tower = "text" if name.startswith("text") else "vision.vision"
                    deviation /= math.sqrt(2 * depth[tower])
                nn.init.normal_(module.weight, std=deviation)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.5)
            elif isinstance(module, RmsNorm | LayerNorm):
                nn.init.ones_(module.weight)
                if isinstance(module, LayerNorm):
                    nn.init.zeros_(module.bias)


def _stored(name: str) -> str:
    for own, prefix in _STORED_PREFIXES:
        if name.startswith(own):
            return prefix + name.removeprefix(own)
    raise AssertionError(name)


class _Learning(Form):
    """Plain torch, in which autocast leaves the norms' rows in their type."""

    def rms_norm(self, stream: Residual, norm: RmsNorm) -> Rows:
        rows = stream.rows
        return functional.rms_norm(rows, norm.weight.shape, norm.weight.to(rows.dtype), norm.eps)


class _Differentiable(Packed):
    """Attention with a backward pass, which the service's kernels have not."""

    __slots__ = ()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        if not q.is_cuda:
            return super().attend(q, k, v, causal=causal)
        from torch.nn.attention.varlen import varlen_attn

        # Takes half precision only.
        longest, bounds = max(self.lengths), self.cu_seqlens
        k, v = grouped(q, k), grouped(q, v)
        found = varlen_attn(q.contiguous(), k, v, bounds, bounds, longest, longest)
        return found if isinstance(found, torch.Tensor) else found[0]
