"""What all blocks have in common, and those that have weights of their own: products and norms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from tessera.nn.forms.plain import PLAIN, Form, Residual

if TYPE_CHECKING:
    from tessera.nn.forms.fp8 import Fp8Weight
    from tessera.nn.forms.plain import Rows


class Block(nn.Module):
    """A module whose operations are those of its form; plain torch until ``use`` says otherwise."""

    form: Form = PLAIN


def use(module: nn.Module, form: Form) -> None:
    """Have ``module`` and every block below it run in ``form``; call it when their weights are in place."""
    for block in module.modules():
        if isinstance(block, Block):
            block.form = form
            form.prepare(block)


class Linear(Block):
    """``rows @ weight.T + bias``, given as it is or added to the residual stream.

    ``deferred`` says that ``add_to`` leaves the bias out, because the norms that read the stream add it.
    ``float_bias`` and ``fp8`` are the bias and the weight as some forms take them.
    """

    def __init__(self, inner: int, columns: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns, inner))
        self.bias = nn.Parameter(torch.empty(columns)) if bias else None
        self.deferred = False
        self.float_bias: torch.Tensor | None = None
        self.fp8: Fp8Weight | None = None

    def forward(self, rows: Rows) -> torch.Tensor:
        """``[tokens, inner]`` to ``[tokens, columns]``."""
        return self.form.product(self, rows)

    def add_to(self, stream: Residual, rows: Rows) -> None:
        """Add the product of ``[tokens, inner]`` to the stream."""
        self.form.add_product(stream, self, rows)


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
