"""The vision tower: patches of whole images in, vision rows out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tessera.models.nemotron_3_5_embed.config import NAMES, VisionConfig
from tessera.nn.forms.plain import Form, Residual, activation_function, tensor
from tessera.nn.layer import SOURCES, Linear, RmsNorm, Stack, use
from tessera.nn.rotary import Rotary
from tessera.nn.vision import PatchEmbedding, VisionTower


class Projector(nn.Module):
    """A norm of each patch, the join of ``join`` patches to one row, and two products to the backbone."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        hidden, self._join = config.layer.hidden, config.merge**2
        self._activation = activation_function(config.activation)
        self.norm = RmsNorm(hidden, eps=config.norm_eps)
        self.merging = Linear(hidden * self._join, hidden, bias=False)
        self.linear_1 = Linear(hidden, config.width, bias=config.bias)
        self.linear_2 = Linear(config.width, config.width, bias=config.bias)

    def prepare(self, form: Form) -> None:
        """Run in ``form``; call it once, when the weights are in place.

        Files have a row's channels one after another, each with its patches; here patches follow one another.
        """
        weight = self.merging.weight
        by_patch = weight.view(len(weight), -1, self._join).transpose(1, 2).flatten(1).contiguous()
        self.merging.weight = nn.Parameter(by_patch, requires_grad=False)
        use(self, form)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[n * join, hidden]`` to ``[n, width]``."""
        joined = tensor(self.norm(Residual(rows))).reshape(-1, self._join * rows.shape[1])
        projected: torch.Tensor = self.linear_2(self._activation(self.linear_1(self.merging(joined))))
        return projected


class PixtralVision(VisionTower):
    """Makes ``[rows, width]``.

    Patches of an image stand in blocks of those that become one row; attention goes by their places.
    """

    sources = {
        **SOURCES,
        "patches.projection": ("patch_conv",),
        "layers": ("transformer.layers",),
        **{name: (stored,) for name, stored in NAMES.items()},
        "merging": ("patch_merger.merging_layer",),
    }

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        self.patches = PatchEmbedding(layer.hidden, config.patch_size, bias=False)
        self.ln_pre = RmsNorm(layer.hidden, eps=layer.eps)
        self.layers = Stack(layer, config.layers)
        self.projector = Projector(config)
        self.rotary: Rotary

    def prepare(self, mean: Sequence[float], std: Sequence[float], device: torch.device, form: Form) -> None:
        self.form = form
        self.patches.place_constants(mean, std, device)
        self.rotary = Rotary.axial(self.config.theta, self.config.layer.head_dim, device, shared=True)
        use(self.ln_pre, form)
        self.projector.prepare(form)
        self.layers.prepare(form, start=self.patches)

    def forward(
        self, pixels: torch.Tensor, positions: torch.Tensor, cu_units: torch.Tensor, units: Sequence[int]
    ) -> torch.Tensor:
        """``positions`` int32 ``[2, units]``: row and column of each patch."""
        embedded = self.ln_pre.weight.new_zeros(len(pixels), self.config.layer.hidden)
        stream = Residual(tensor(self.ln_pre(self.patches(pixels, embedded))))
        self.layers(stream, self.form.packed(cu_units, units), self.rotary(positions))
        rows: torch.Tensor = self.projector(self.layers.output(stream, self.config.layers - 1))
        return rows
