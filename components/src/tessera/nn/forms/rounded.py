"""Products as FP8 has them by plain torch, for any device: the kernels' reference, and to measure loss by.

Weights and inputs are rounded to e4m3 with their scales; all else is the plain form's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from tessera.nn.forms.plain import Form, Rows, tensor
from tessera.nn.fp8 import Fp8Weight, row_scales, values_of
from tessera.nn.layer import Linear

if TYPE_CHECKING:
    from tessera.nn.layer import Block


class Rounded(Form):
    """``every`` takes the weights that are in half precision, too; without it they stay as they are."""

    def __init__(self, *, every: bool) -> None:
        self._every = every

    def prepare(self, block: Block) -> None:
        if not isinstance(block, Linear) or (block.fp8 is None and not self._every):
            return
        if block.fp8 is None:
            block.fp8 = Fp8Weight.of(block.weight)
        # Multiplied out once: the product in float32 is the same.
        block.weight = nn.Parameter(block.fp8.multiplied(), requires_grad=False)

    def product(self, linear: Linear, rows: Rows) -> torch.Tensor:
        if linear.fp8 is None:
            return super().product(linear, rows)
        given, weight = tensor(rows), linear.fp8
        bias = None if linear.bias is None else linear.bias.float()
        if given.dtype != torch.bfloat16:
            return weight.reference(given, bias, linear.weight).to(given.dtype)
        # Numbers of e4m3 are numbers of bfloat16, whose products are 2.4 times as fast on a CPU with them.
        # The sum is rounded once more than on a card, before it is scaled.
        scales = row_scales(given) if weight.input_scale is None else weight.input_scale
        values = values_of(given, scales).to(torch.bfloat16)
        scaled = functional.linear(values, weight.values.to(torch.bfloat16)).float() * (
            scales * weight.scales
        )
        return (scaled if bias is None else scaled + bias).to(given.dtype)
