"""TensorRT's network API one layer at a time: constants, and what works element by element.

Weights are not copied by TensorRT until the engine is built, so they are held on to here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tessera.engine.tensorrt.types import to_name, to_tensorrt
from tessera.errors import EngineBuildFailed
from tessera.models.graph import Node

_TORCH = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}
BY_NAME = {name: dtype for dtype, name in _TORCH.items()}


class TensorRTLayers:
    """Adds layers to an ``INetworkDefinition``, named after the part of the network that they belong to."""

    def __init__(self, trt: Any, network: Any) -> None:
        self._trt = trt
        self._network = network
        self._part = "network"
        self.weights: dict[str, torch.Tensor] = {}

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        outer, self._part = self._part, name
        try:
            yield
        finally:
            self._part = outer

    def constant(self, value: torch.Tensor) -> Node:
        value = value.detach().to("cpu").contiguous()
        dtype = _TORCH[value.dtype]
        weights = self._trt.Weights(to_tensorrt(self._trt, dtype), value.data_ptr(), value.numel())
        node = self._out(self._network.add_constant(tuple(value.shape), weights), dtype)
        self.weights[node.handle.name] = value
        return node

    def cast(self, node: Node, dtype: str) -> Node:
        if node.dtype == dtype:
            return node
        return self._out(self._network.add_cast(node.handle, to_tensorrt(self._trt, dtype)), dtype)

    def add(self, a: Node, b: Node | float) -> Node:
        return self._binary("SUM", a, b)

    def subtract(self, a: Node, b: Node | float) -> Node:
        return self._binary("SUB", a, b)

    def multiply(self, a: Node, b: Node | float) -> Node:
        return self._binary("PROD", a, b)

    def divide(self, a: Node, b: Node | float) -> Node:
        return self._binary("DIV", a, b)

    def maximum(self, a: Node, b: Node | float) -> Node:
        return self._binary("MAX", a, b)

    def minimum(self, a: Node, b: Node | float) -> Node:
        return self._binary("MIN", a, b)

    def less(self, a: Node, b: Node | float) -> Node:
        return self._binary("LESS", a, b, "bool")

    def both(self, a: Node, b: Node) -> Node:
        return self._binary("AND", a, b)

    def negate(self, a: Node) -> Node:
        return self._unary("NOT", a, "bool")

    def is_nan(self, node: Node) -> Node:
        return self._unary("ISNAN", node, "bool")

    def sqrt(self, node: Node) -> Node:
        return self._unary("SQRT", node, node.dtype)

    def select(self, condition: Node, a: Node, b: Node | float) -> Node:
        other = self._same_rank(self._operand(b, a), a.rank)
        condition = self._same_rank(condition, a.rank)
        layer = self._network.add_select(condition.handle, a.handle, other.handle)
        return self._out(layer, a.dtype)

    def activation(self, node: Node, name: str) -> Node:
        kinds = {"gelu": "GELU_ERF", "gelu_tanh": "GELU_TANH", "sigmoid": "SIGMOID", "relu": "RELU"}
        kind = getattr(self._trt.ActivationType, kinds[name])
        return self._out(self._network.add_activation(node.handle, kind), node.dtype)

    def _unary(self, name: str, a: Node, dtype: str) -> Node:
        return self._out(self._network.add_unary(a.handle, getattr(self._trt.UnaryOperation, name)), dtype)

    def _binary(self, name: str, a: Node, b: Node | float, dtype: str | None = None) -> Node:
        b = self._operand(b, a)
        if a.dtype != b.dtype:
            raise EngineBuildFailed(f"{name} of {a.dtype} and {b.dtype}: operands must have one type")
        rank = max(a.rank, b.rank)
        a, b = self._same_rank(a, rank), self._same_rank(b, rank)
        operation = getattr(self._trt.ElementWiseOperation, name)
        return self._out(self._network.add_elementwise(a.handle, b.handle, operation), dtype or a.dtype)

    def _operand(self, value: Node | float, like: Node) -> Node:
        if isinstance(value, Node):
            return value
        return self.constant(torch.full([1] * like.rank, value, dtype=BY_NAME[like.dtype]))

    def _same_rank(self, node: Node, rank: int) -> Node:
        while node.rank < rank:
            node = self.unsqueeze(node, 0)
        return node

    def unsqueeze(self, node: Node, axis: int) -> Node:
        axes = self.constant(torch.tensor([axis])).handle
        return self._out(self._network.add_unsqueeze(node.handle, axes), node.dtype)

    def _out(self, layer: Any, dtype: str) -> Node:
        if layer is None:
            raise EngineBuildFailed("TensorRT refused a layer; its log says why")
        layer.name = f"{self._part} {layer.type.name.lower()} {self._network.num_layers}"
        tensor = layer.get_output(0)
        try:
            rank = len(tensor.shape)
        except ValueError as error:
            raise EngineBuildFailed(f"{layer.name}: its operands' shapes do not go together") from error
        found = to_name(self._trt, tensor.dtype)
        if found != dtype or rank < 0:
            raise EngineBuildFailed(f"{layer.name}: its output is {found}, expected was {dtype}")
        return Node(tensor, dtype, rank)
