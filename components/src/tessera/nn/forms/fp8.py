"""Products in FP8 (e4m3) on CUDA; norms, attention and the residual stay in half precision.

Each row of a product's input has a scale, or all have the one that was stored, and so has each column of the
weight. What a product adds to the residual is left pending for the next norm, which reads that anyway. A
layer may have weights in half precision among those in FP8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tessera.nn.forms.fused import Fused, gate_by
from tessera.nn.forms.plain import GELU_TANH, Residual, Rows, activation_function
from tessera.nn.fp8 import Fp8Weight
from tessera.nn.kernels import fp8, gate, gemm
from tessera.nn.layer import LayerNorm, Linear, RmsNorm

if TYPE_CHECKING:
    from tessera.nn.layer import Block


class Fp8(Fused):
    """``every`` takes the weights that are in half precision, too; without it they stay as they are."""

    def __init__(self, *, every: bool) -> None:
        self._every = every

    def prepare(self, block: Block) -> None:
        if isinstance(block, Linear) and block.fp8 is None and self._every:
            block.hold(Fp8Weight.of(block.weight))

    def rms_norm(self, stream: Residual, norm_of: RmsNorm) -> Rows:
        if norm_of.feeds is None:
            return super().rms_norm(stream, norm_of)
        pending, stream.pending = stream.pending, None
        return fp8.add_rms_norm(stream.rows, pending, norm_of.weight, norm_of.eps, norm_of.feeds.input_scale)

    def layer_norm(self, stream: Residual, norm_of: LayerNorm) -> Rows:
        # A stream that is renewed needs its rows in half precision; the product quantises its own.
        if norm_of.feeds is None or norm_of.renews:
            return super().layer_norm(stream, norm_of)
        pending, stream.pending = stream.pending, None
        assert norm_of.offset is not None, "the norm has not been prepared"
        return fp8.add_layer_norm(
            stream.rows,
            pending,
            norm_of.offset,
            norm_of.weight,
            norm_of.bias,
            norm_of.eps,
            norm_of.feeds.input_scale,
        )

    def product(self, linear: Linear, rows_in: Rows) -> torch.Tensor:
        return self._product(linear, rows_in, linear.bias)

    def _product(self, linear: Linear, rows_in: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        weight = linear.fp8
        if weight is None:
            return super().product(linear, rows_in)
        return weight.product(*_quantised(rows_in, weight), bias)

    def activated(self, linear: Linear, rows_in: Rows, activation: str) -> Rows:
        weight, feeds = linear.fp8, linear.feeds
        if weight is None and feeds is None:
            return super().activated(linear, rows_in, activation)
        scale = None if feeds is None else feeds.input_scale
        if weight is not None and linear.float_bias is not None and gemm.activates_fp8(weight, activation):
            rows_in = _quantised(rows_in, weight)
            if len(rows_in[0]) >= gemm.LEAST_ROWS:
                rows = gemm.activated_fp8(*rows_in, weight, linear.float_bias, activation, scale)
                if scale is not None:
                    return rows, scale.expand(len(rows), 1).contiguous()
                return rows if feeds is None else fp8.quantise(rows)
        wide = self.product(linear, rows_in)
        if feeds is None:
            return activation_function(activation)(wide)
        if activation in GELU_TANH:
            return fp8.gelu_tanh(wide, scale)
        return fp8.quantise(activation_function(activation)(wide), scale)

    def gated(self, linear: Linear, rows_in: Rows, activation: str) -> Rows:
        weight, feeds = linear.fp8, linear.feeds
        if weight is None and feeds is None:
            return super().gated(linear, rows_in, activation)
        scale = None if feeds is None else feeds.input_scale
        if weight is not None and activation == "silu" and linear.bias is None and gemm.gates_fp8(weight):
            rows_in = _quantised(rows_in, weight)
            if len(rows_in[0]) >= gemm.LEAST_ROWS:
                rows = gemm.gated_fp8(*rows_in, weight)
                return rows if feeds is None else fp8.quantise(rows, scale)
        both = self.product(linear, rows_in)
        if feeds is None:
            return gate.silu_gate(both) if activation == "silu" else gate_by(activation, both)
        if activation == "silu":
            return fp8.silu_gate(both, scale)
        return fp8.quantise(gate_by(activation, both), scale)

    def add_product(self, stream: Residual, linear: Linear, rows_in: Rows) -> None:
        stream.settled()
        if linear.fp8 is None:
            super().add_product(stream, linear, rows_in)
        else:
            stream.pending = self._product(linear, rows_in, None if linear.deferred else linear.bias)


def _quantised(rows_in: Rows, weight: Fp8Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs of ``weight``, as they are or made into FP8."""
    return rows_in if isinstance(rows_in, tuple) else fp8.quantise(rows_in, weight.input_scale)
