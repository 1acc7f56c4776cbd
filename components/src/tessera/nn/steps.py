"""What a checkpoint declares behind pooling: products, LayerNorm, rows of length 1; all in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import layer_norm, linear, relu

from tessera.checkpoint.declared import Activation, Dense, LayerNorm, Step
from tessera.nn.forms.plain import activation_function

# The others are called by their names in ``torch.nn.functional``.
_ACTIVATIONS: Final[Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]]] = {
    "identity": lambda rows: rows,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu_tanh": activation_function("gelu_pytorch_tanh"),
    "quick_gelu": activation_function("quick_gelu"),
    "relu_squared": lambda rows: relu(rows).square(),
    "laplace": lambda rows: 0.5 * (1 + torch.erf((rows - 0.707107) / (0.282095 * 2**0.5))),
    "sqrt_softplus": lambda rows: functional.softplus(rows).sqrt(),
}
_LAYER_NORM_EPS: Final = 1e-5
_SHORTEST: Final = 1e-12


class DenseStep(nn.Module):
    """A product with its activation, and its input beside it if that is declared."""

    def __init__(self, step: Dense) -> None:
        super().__init__()
        self.linear = nn.Linear(step.inner, step.width, bias=step.bias)
        wider = step.residual and step.inner != step.width
        self.residual = nn.Linear(step.inner, step.width, bias=False) if wider else None
        self._adds_input = step.residual
        self._activate = _ACTIVATIONS.get(step.activation) or getattr(functional, step.activation)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        bias = None if self.linear.bias is None else self.linear.bias.float()
        projected = self._activate(linear(rows, self.linear.weight.float(), bias))
        if not self._adds_input:
            return projected
        return projected + (rows if self.residual is None else linear(rows, self.residual.weight.float()))


class LayerNormStep(nn.Module):
    def __init__(self, step: LayerNorm) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(step.width, eps=_LAYER_NORM_EPS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weight, bias = self.norm.weight.float(), self.norm.bias.float()
        return layer_norm(rows, self.norm.normalized_shape, weight, bias, self.norm.eps)


class NormalizeStep(nn.Module):
    """Divides each row by its length, of which 1e-12 is the least."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows / rows.square().sum(-1, keepdim=True).sqrt().clamp(min=_SHORTEST)


def step_modules(steps: Sequence[Step]) -> nn.ModuleList:
    """Build the module of each step."""
    return nn.ModuleList(_module(step) for step in steps)


def _module(step: Step) -> nn.Module:
    if isinstance(step, Dense):
        return DenseStep(step)
    return LayerNormStep(step) if isinstance(step, LayerNorm) else NormalizeStep()
