"""RMSNorm and LayerNorm over the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from tessera.nn.block import Block
from tessera.nn.forms.plain import Residual

if TYPE_CHECKING:
    from tessera.nn.forms.plain import Rows


class RmsNorm(Block):
    """``x / sqrt(mean(x²) + eps) * weight``, computed in float32 whatever the rows' type."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, stream: Residual) -> Rows:
        """``[tokens, width]`` in the stream's type, or as the products of an FP8 layer take it."""
        return self.form.rms_norm(stream, self)


class LayerNorm(Block):
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, computed in float32 whatever the rows' type.

    ``offset``, float32 ``[width]``, is what the stream lacks: biases of products, the same for every row.
    """

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.offset: torch.Tensor | None
        self.register_buffer("offset", None, persistent=False)

    def forward(self, stream: Residual) -> Rows:
        """``[tokens, width]`` in the stream's type, or as the products of an FP8 layer take it."""
        return self.form.layer_norm(stream, self)


Norm = RmsNorm | LayerNorm


def norm(kind: Literal["rms", "layer"], width: int, *, eps: float) -> Norm:
    """The norm of that name."""
    return RmsNorm(width, eps=eps) if kind == "rms" else LayerNorm(width, eps=eps)
