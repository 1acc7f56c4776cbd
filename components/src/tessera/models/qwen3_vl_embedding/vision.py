"""The vision tower: patches of whole images in, vision rows out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tessera.models.qwen3_vl_embedding.config import VisionConfig
from tessera.nn.forms.plain import Form, Residual
from tessera.nn.layer import Stack, use
from tessera.nn.rotary import Rotary
from tessera.nn.table import Table
from tessera.nn.vision import Merger, PatchEmbedding, VisionTower


class Qwen3VLVision(VisionTower):
    """Makes ``[rows, (1 + levels) * out_hidden]``.

    A row is what the merger makes of the last block, and behind it what the DeepStack mergers make of
    earlier ones.
    """

    sources = {
        "projection": ("proj",),
        "layers": ("blocks",),
        "input_layernorm": ("norm1",),
        "post_attention_layernorm": ("norm2",),
        "self_attn": ("attn",),
        "qkv_proj": ("qkv",),
        "o_proj": ("proj",),
        "up_proj": ("linear_fc1",),
        "down_proj": ("linear_fc2",),
        "deepstack": ("deepstack_merger_list",),
        "linear_1": ("linear_fc1",),
        "linear_2": ("linear_fc2",),
    }

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.layer.hidden
        self.patch_embed = PatchEmbedding(hidden, config.patch_size, bias=True, frames=config.frames)
        self.pos_embed = Table(config.grid**2, hidden)
        self.layers = Stack(config.layer, config.layers)
        self.merger = self._merger(norm_joined=False)
        self.deepstack = nn.ModuleList(self._merger(norm_joined=True) for _ in config.deepstack)
        self.rotary: Rotary

    def _merger(self, *, norm_joined: bool) -> Merger:
        hidden, join = self.config.layer.hidden, self.config.merge**2
        return Merger(
            width=hidden,
            join=join,
            inner=hidden * join,
            out=self.config.out_hidden,
            eps=self.config.layer.eps,
            norm_joined=norm_joined,
        )

    def prepare(self, mean: Sequence[float], std: Sequence[float], device: torch.device, form: Form) -> None:
        self.form = form
        self.patch_embed.fold_frames(self.config.frames)
        self.patch_embed.place_constants(mean, std, device)
        self.rotary = Rotary.axial(self.config.theta, self.config.layer.head_dim, device)
        for block in (self.merger, self.deepstack):
            use(block, form)
        self.layers.prepare(form, start=self.patch_embed)

    def forward(
        self, pixels: torch.Tensor, positions: torch.Tensor, cu_units: torch.Tensor, units: Sequence[int]
    ) -> torch.Tensor:
        """``positions`` int32 ``[4, units]``: row, column, height and width, as ``patches.places`` says."""
        table = self.pos_embed.weight
        stream = self.patch_embed(pixels, table.new_zeros(len(pixels), table.shape[1]))
        self.form.add_weighted(stream, table, *taps(positions, self.config.grid))
        levels: list[torch.Tensor] = []

        def after(number: int, stream: Residual) -> None:
            if number in self.config.deepstack:
                merger = self.deepstack[len(levels)]
                levels.append(merger(self.layers.output(stream, number)))

        self.layers(stream, self.form.packed(cu_units, units), self.rotary(positions), after)
        main = self.merger(self.layers.output(stream, self.config.layers - 1))
        return torch.cat((main, *levels), dim=1)


def taps(positions: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each patch reads the learned table of ``side`` by ``side`` positions, and how much of each.

    An image's first and last patches lie on the table's first and last positions; between them it is read
    bilinearly: int32 ``[4, units]`` and float32 ``[4, units]``, which add up to 1.
    """
    sizes = (positions[2:] - 1).clamp(min=1)
    places = positions[:2].to(torch.float32) * (side - 1) / sizes
    low = places.floor()
    share = places - low
    first = low.to(torch.int32)
    second = (first + 1).clamp(max=side - 1)
    index = torch.stack(
        [one * side + other for one in (first[0], second[0]) for other in (first[1], second[1])]
    )
    weights = [one * other for one in (1 - share[0], share[0]) for other in (1 - share[1], share[1])]
    return index, torch.stack(weights)
