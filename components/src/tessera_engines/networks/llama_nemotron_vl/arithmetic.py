"""Which type each kind of operation of a network computes in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from tessera.nn.layer import LayerNorm, Linear
from tessera_engines.networks.graph import Graph, Node

_FLOAT16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Products and attention in ``products``; norms, activations and rotations in float32 always.

    ``scales`` gives the linear modules whose operands are float8 the step of their input. The residual is
    kept in bfloat16 or float32, never in float16: its range is what float16 networks fail by.
    """

    graph: Graph
    products: str
    scales: Mapping[nn.Module, float] = field(default_factory=dict)

    @property
    def residual(self) -> str:
        return "float32" if self.products == "float16" else self.products

    def linear(self, node: Node, module: Linear) -> Node:
        node = self.graph.cast(node, self.products)
        return self.graph.linear(node, module.weight, module.bias, scale=self.scales.get(module))

    def layer_norm(self, node: Node, module: LayerNorm) -> Node:
        normed = self.graph.layer_norm(
            self.graph.cast(node, "float32"), module.weight.float(), module.bias.float(), module.eps
        )
        return self.graph.cast(normed, self.products)

    def rms_norm(self, node: Node, weight: torch.Tensor, eps: float) -> Node:
        exact = self.graph.cast(node, "float32")
        mean = self.graph.mean(self.graph.multiply(exact, exact), -1, keep=True)
        normed = self.graph.divide(exact, self.graph.sqrt(self.graph.add(mean, eps)))
        scale = self.graph.constant(weight.float().view(*[1] * (node.rank - 1), -1))
        return self.graph.cast(self.graph.multiply(normed, scale), self.products)

    def add(self, residual: Node, added: Node) -> Node:
        return self.graph.add(residual, self.graph.cast(added, self.residual))

    def narrowed(self, node: Node) -> Node:
        """float32 to the products' type; what float16 cannot hold becomes its largest number."""
        if self.products == "float16":
            node = self.graph.maximum(self.graph.minimum(node, _FLOAT16_MAX), -_FLOAT16_MAX)
        return self.graph.cast(node, self.products)

    def activation(self, node: Node, name: str) -> Node:
        """The configuration's activation, float32 in and out."""
        node = self.graph.cast(node, "float32")
        if name == "silu":
            return self.graph.multiply(node, self.graph.activation(node, "sigmoid"))
        if name == "quick_gelu":
            return self.graph.multiply(
                node, self.graph.activation(self.graph.multiply(node, 1.702), "sigmoid")
            )
        same = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
        return self.graph.activation(node, same.get(name, name))
