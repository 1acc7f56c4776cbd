"""Products in FP8 (e4m3) on CUDA; norms, attention and the residual stay in half precision.

Each row of a product's input has a scale, and each column of the weight. What a product adds to the residual
is left pending for the next norm, which reads the residual anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from tessera.nn.forms.fused import Fused, gate_by
from tessera.nn.forms.plain import GELU_TANH, Residual, Rows, activation_function
from tessera.nn.kernels import fp8
from tessera.nn.layer import LayerNorm, Linear, RmsNorm

if TYPE_CHECKING:
    from tessera.nn.layer import Block


class Fp8Weight:
    """A weight ``[columns, inner]`` in FP8; a quarter of float32, and twice bfloat16's rate on Hopper."""

    __slots__ = ("_scales", "_values")

    def __init__(self, weight: torch.Tensor) -> None:
        values, scales = fp8.quantise(weight.contiguous())
        self._values = values.t()
        self._scales = scales.t().contiguous()

    @classmethod
    def taken_from(cls, module: Linear) -> Fp8Weight:
        """The module's weight, which the module itself no longer holds."""
        quantised = cls(module.weight)
        module.weight = nn.Parameter(torch.empty(0, device=module.weight.device), requires_grad=False)
        return quantised

    def product(self, rows: fp8.Quantised, bias: torch.Tensor | None = None) -> torch.Tensor:
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


class Fp8(Fused):
    def prepare(self, block: Block) -> None:
        if isinstance(block, Linear):
            block.fp8 = Fp8Weight.taken_from(block)

    def rms_norm(self, stream: Residual, norm_of: RmsNorm) -> Rows:
        pending, stream.pending = stream.pending, None
        return fp8.add_rms_norm(stream.rows, pending, norm_of.weight, norm_of.eps)

    def layer_norm(self, stream: Residual, norm_of: LayerNorm) -> Rows:
        if norm_of.renews:  # the stream needs its rows in half precision; the product quantises its own
            return super().layer_norm(stream, norm_of)
        pending, stream.pending = stream.pending, None
        assert norm_of.offset is not None, "the norm has not been prepared"
        weight, bias = norm_of.weight, norm_of.bias
        return fp8.add_layer_norm(stream.rows, pending, norm_of.offset, weight, bias, norm_of.eps)

    def product(self, linear: Linear, rows_in: Rows) -> torch.Tensor:
        return _product(linear, rows_in, linear.bias)

    def activated(self, linear: Linear, rows_in: Rows, activation: str) -> Rows:
        wide = _product(linear, rows_in, linear.bias)
        return (
            fp8.gelu_tanh(wide)
            if activation in GELU_TANH
            else fp8.quantise(activation_function(activation)(wide))
        )

    def gated(self, linear: Linear, rows_in: Rows, activation: str) -> Rows:
        both = _product(linear, rows_in, linear.bias)
        return fp8.silu_gate(both) if activation == "silu" else fp8.quantise(gate_by(activation, both))

    def add_product(self, stream: Residual, linear: Linear, rows_in: Rows) -> None:
        stream.settled()
        stream.pending = _product(linear, rows_in, None if linear.deferred else linear.bias)


FP8 = Fp8()


def _product(linear: Linear, rows_in: Rows, bias: torch.Tensor | None) -> torch.Tensor:
    assert linear.fp8 is not None, "the weight has not been taken"
    quantised = rows_in if isinstance(rows_in, tuple) else fp8.quantise(rows_in)
    return linear.fp8.product(quantised, bias)
