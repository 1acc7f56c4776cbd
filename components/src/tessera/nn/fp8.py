"""Weights in FP8 (e4m3), and the arithmetic of FP8 by plain torch: what kernels do is measured by it.

"FP8 Formats for Deep Learning" (Micikevicius et al., 2022) has the type: no infinities, at most 448.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import linear, pad

LARGEST: Final = 448.0
"""The largest finite e4m3 number."""

_LEAST: Final = 1e-12
_MULTIPLE: Final = 16


def row_scales(rows: torch.Tensor) -> torch.Tensor:
    """What makes the largest number of each row ``[total, width]`` that of the type: ``[total, 1]``."""
    return rows.abs().amax(1, keepdim=True).float().clamp(min=_LEAST) / LARGEST


def values_of(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``rows`` over their scales in e4m3, what lies beyond its numbers at the last of them."""
    return (rows.float() / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def rounded(rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """``rows`` ``[total, width]`` as an FP8 product reads them, in float32.

    ``scale`` is the one scale of all rows, without which each has its own.
    """
    scales = row_scales(rows) if scale is None else scale
    return values_of(rows, scales).float() * scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """A weight ``[columns, inner]`` in e4m3: a quarter of float32, and twice bfloat16's rate on Hopper.

    ``scales`` float32 ``[columns]`` multiply its rows, so that tensors with scales of their own can lie side
    by side. ``input_scale`` float32 ``[]`` is that of the product's inputs; None for one for each row.
    """

    values: torch.Tensor
    scales: torch.Tensor
    input_scale: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: torch.Tensor) -> Fp8Weight:
        """Return ``weight`` rounded, each of its rows with a scale."""
        scales = row_scales(weight)
        return cls(values=values_of(weight, scales), scales=scales.flatten())

    @staticmethod
    def fits(columns: int, inner: int) -> bool:
        """Whether cuBLAS multiplies a weight of this shape in FP8: both sides are multiples of 16."""
        return columns % _MULTIPLE == 0 and inner % _MULTIPLE == 0

    def padded(self, *, columns: int = 0, inner: int = 0) -> Fp8Weight:
        """Return the weight with so many zeros behind its columns and along its inner width."""
        # Torch pads no FP8.
        values = pad(self.values.view(torch.uint8), (0, inner, 0, columns)).view(torch.float8_e4m3fn)
        return Fp8Weight(values=values, scales=pad(self.scales, (0, columns)), input_scale=self.input_scale)

    def multiplied(self) -> torch.Tensor:
        """Return the weight that the values and scales stand for, float32."""
        return self.values.float() * self.scales[:, None]

    def reference(
        self, rows: torch.Tensor, bias: torch.Tensor | None = None, whole: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return float32 ``[total, columns]`` of ``rows`` ``[total, inner]`` by plain torch.

        ``whole`` is what ``multiplied`` returns, where that is kept.
        """
        weight = self.multiplied() if whole is None else whole
        return linear(rounded(rows, self.input_scale), weight, bias)

    def product(
        self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """bfloat16 ``[total, columns]`` of e4m3 ``[total, inner]`` and its scales ``[total, 1]``.

        ``bias`` is bfloat16. Summed in float32, then multiplied by both scales.
        """
        return torch._scaled_mm(
            values,
            self.values.t(),
            scale_a=scales,
            scale_b=self.scales[None],
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
