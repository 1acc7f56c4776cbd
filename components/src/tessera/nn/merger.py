"""From the rows of a vision tower to fewer and wider ones."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from tessera.nn.forms.plain import Residual, activation_function
from tessera.nn.linear import Linear
from tessera.nn.norm import norm


def pixel_shuffle(features: torch.Tensor, factor: int, version: Literal["v1", "v2"]) -> torch.Tensor:
    """Join ``factor`` by ``factor`` patches: ``[n, g * g, c]`` to ``[n, (g / factor)**2, factor**2 * c]``.

    A joined row holds its patches row by row. Version 2 keeps the rows in reading order, version 1 lists
    them column by column.
    """
    n, patches, channels = features.shape
    edge = round(patches**0.5) // factor
    blocks = features.reshape(n, edge, factor, edge, factor, channels)
    order = (0, 1, 3, 2, 4, 5) if version == "v2" else (0, 3, 1, 2, 4, 5)
    return blocks.permute(order).reshape(n, edge * edge, factor * factor * channels)


class Merger(nn.Module):
    """A norm, two products with an activation between them; each ``join`` consecutive rows become one.

    ``norm_joined`` puts the norm over the joined rows instead of over each.
    """

    def __init__(
        self,
        *,
        width: int,
        join: int,
        inner: int,
        out: int,
        eps: float,
        kind: Literal["rms", "layer"] = "layer",
        norm_joined: bool = False,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        self._width, self._join, self._norm_joined = width, join, norm_joined
        self._activation = activation
        self.norm = norm(kind, width * join if norm_joined else width, eps=eps)
        self.linear_1 = Linear(width * join, inner, bias=True)
        self.linear_2 = Linear(inner, out, bias=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[n * join, width]`` to ``[n, out]``."""
        joined = rows.reshape(-1, self._join * self._width)
        normed = self.norm(Residual(joined if self._norm_joined else rows)).view_as(joined)
        merged: torch.Tensor = self.linear_2(activation_function(self._activation)(self.linear_1(normed)))
        return merged
