"""The activation functions that a configuration can name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")
"""The names of GELU's tanh form."""

Activation = Callable[[torch.Tensor], torch.Tensor]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


_BY_NAME: dict[str, Activation] = {
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}


def activation(name: str) -> Activation:
    """The function called ``name``; the configuration reader has refused unknown names."""
    return _BY_NAME[name]
