"""A matrix product with a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from tessera.nn.block import Block
from tessera.nn.forms.plain import Residual

if TYPE_CHECKING:
    from tessera.nn.forms.fp8 import Fp8Weight
    from tessera.nn.forms.plain import Rows


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
