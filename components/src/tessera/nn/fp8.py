"""Products in FP8 (e4m3), with a scale for each row of the input and each column of the weight."""

from __future__ import annotations

import torch
from torch import nn

from tessera.nn.kernels.fp8 import Quantised, quantise
from tessera.nn.linear import Linear


class Fp8Weight:
    """A weight ``[columns, inner]`` in FP8; a quarter of float32, and twice bfloat16's rate on Hopper."""

    __slots__ = ("_scales", "_values")

    def __init__(self, weight: torch.Tensor) -> None:
        values, scales = quantise(weight.contiguous())
        self._values = values.t()
        self._scales = scales.t().contiguous()

    @classmethod
    def taken_from(cls, module: Linear) -> Fp8Weight:
        """The module's weight, which the module itself no longer holds."""
        quantised = cls(module.weight)
        module.weight = nn.Parameter(torch.empty(0, device=module.weight.device), requires_grad=False)
        return quantised

    def product(self, rows: Quantised, bias: torch.Tensor | None = None) -> torch.Tensor:
        """bfloat16 ``[total, columns]``; ``bias`` is bfloat16."""
        values, scales = rows
        return torch._scaled_mm(
            values,
            self._values,
            scale_a=scales,
            scale_b=self._scales,
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
