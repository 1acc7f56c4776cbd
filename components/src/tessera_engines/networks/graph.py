"""Networks described over TensorRT's network API, strongly typed.

TensorRT does not copy weights until the engine is built, so the graph keeps them alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessera.dtypes import DTYPES, dtype_of
from tessera.errors import EngineBuildFailed
from tessera.nn.fp8 import LARGEST
from tessera_engines.compiled.manifest import Binding
from tessera_engines.tensorrt.module import to_name, to_tensorrt


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis whose size the batch decides: ``plus`` more than there are units, sequences, tokens or rows."""

    name: str
    plus: int = 0


UNITS, SEQUENCES, TOKENS, ROWS = Axis("units"), Axis("sequences"), Axis("tokens"), Axis("rows")
BOUNDS = Axis("sequences", plus=1)


@dataclass(frozen=True, slots=True)
class Node:
    """A tensor of the network.

    ``handle`` is the compiler's own; ``dtype`` is float8 to float32, bfloat16, int32, int64, uint8 or bool.
    """

    handle: Any
    dtype: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Inputs that stand for what is served: uint8 ``[channels, height, width]`` and int32 ``[n]``."""

    tiles: Sequence[npt.NDArray[np.uint8]] = ()
    tokens: Sequence[npt.NDArray[np.int32]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRequest:
    """Which network to describe; ``stage`` vision, text, fused, embed, lm or post.

    ``dtype`` float32, bfloat16, float16 or float8; ``packed`` false pads every sequence of a text batch to
    one length; ``max_length`` is the longest sequence that the positions have to reach. ``samples`` are what
    float8 is calibrated with.
    """

    stage: str
    dtype: str
    packed: bool
    max_length: int
    samples: Samples = Samples()


class Graph:
    """Fills an ``INetworkDefinition`` with the operations that the families' networks are made of.

    Every tensor has one declared type, and nothing is converted unless ``cast`` says so. Operands of one
    operation have one type; their shapes broadcast as numpy's do, and a number stands for a constant of the
    other operand's type. Layers are named after the part of the network that they belong to.
    """

    def __init__(self, trt: Any, network: Any, *, decomposable: bool) -> None:
        self._trt = trt
        self._network = network
        self._decomposable = decomposable
        self._part = "network"
        self.weights: dict[str, torch.Tensor] = {}
        self.inputs: dict[str, tuple[int | Axis, ...]] = {}
        self.bindings: list[Binding] = []
        self.attentions: list[Any] = []

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """What is described inside is part of ``name`` in everything that is said about the network."""
        outer, self._part = self._part, name
        try:
            yield
        finally:
            self._part = outer

    def constant(self, value: torch.Tensor) -> Node:
        value = value.detach().to("cpu").contiguous()
        dtype = dtype_of(value.dtype).name
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
        """The opposite of a bool."""
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
        """gelu, gelu_tanh, sigmoid or relu."""
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
        return self.constant(torch.full([1] * like.rank, value, dtype=DTYPES[like.dtype].torch))

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

    # What goes in and out

    def input(self, name: str, dtype: str, shape: Sequence[int | Axis]) -> Node:
        sizes = tuple(-1 if isinstance(size, Axis) else size for size in shape)
        tensor = self._network.add_input(name, to_tensorrt(self._trt, dtype), sizes)
        if tensor is None:
            raise EngineBuildFailed(f"TensorRT refused the input {name} {dtype} {list(sizes)}")
        for number, size in enumerate(shape):
            if isinstance(size, Axis):
                # Axes of one name are known to be of one size.
                tensor.set_dimension_name(number, f"{size.name}{size.plus or ''}")
        self.inputs[name] = tuple(shape)
        self.bindings.append(Binding(name=name, output=False, dtype=dtype, shape=sizes))
        return Node(tensor, dtype, len(sizes))

    def output(self, name: str, node: Node) -> None:
        # A tensor that is an input, or another output, cannot be marked itself.
        tensor = self._out(self._network.add_identity(node.handle), node.dtype).handle
        tensor.name = name
        self._network.mark_output(tensor)
        shape = tuple(tensor.shape)
        self.bindings.append(Binding(name=name, output=True, dtype=node.dtype, shape=shape))

    # GEMMs and attention

    def linear(
        self,
        node: Node,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        scale: float | None = None,
    ) -> Node:
        """``node @ weight.T + bias``, ``weight`` ``[out, in]``.

        With ``scale``, both operands are float8: ``node`` divided by it, ``weight`` by its own largest value.
        """
        if scale is None:
            matrix = self.constant(
                weight.to(DTYPES[node.dtype].torch).view(*_ones(node, weight), *weight.shape)
            )
        else:
            matrix = self._float8_weight(weight, node)
            node = self._float8(node, scale)
        keep, turn = self._trt.MatrixOperation.NONE, self._trt.MatrixOperation.TRANSPOSE
        layer = self._network.add_matrix_multiply(node.handle, keep, matrix.handle, turn)
        product = self._out(layer, node.dtype)
        if bias is None:
            return product
        shape = (*[1] * (node.rank - 1), bias.shape[0])
        return self.add(product, self.constant(bias.to(DTYPES[node.dtype].torch).view(shape)))

    def _float8(self, node: Node, scale: float) -> Node:
        """The rounding to float8 and back that TensorRT turns into float8 GEMMs."""
        factor = self.constant(torch.tensor(scale)).handle
        quantised = self._network.add_quantize(node.handle, factor, self._trt.fp8)
        return self._dequantised(self._out(quantised, "float8"), factor, node.dtype)

    def _float8_weight(self, weight: torch.Tensor, node: Node) -> Node:
        scale = weight.abs().max().float().clamp(min=1e-12) / LARGEST
        rounded = (weight.float() / scale).to(torch.float8_e4m3fn)
        stored = self.constant(rounded.view(*_ones(node, weight), *weight.shape))
        return self._dequantised(stored, self.constant(scale).handle, node.dtype)

    def _dequantised(self, node: Node, factor: Any, dtype: str) -> Node:
        layer = self._network.add_dequantize(node.handle, factor, to_tensorrt(self._trt, dtype))
        return self._out(layer, dtype)

    def matmul(self, a: Node, b: Node) -> Node:
        keep = self._trt.MatrixOperation.NONE
        return self._out(self._network.add_matrix_multiply(a.handle, keep, b.handle, keep), a.dtype)

    def attention(
        self, q: Node, k: Node, v: Node, *, mask: Node | None = None, bounds: tuple[Node, Node] | None = None
    ) -> Node:
        """Full attention of queries that are scaled already, with fewer key heads if wanted.

        Padded: ``[batch, heads, length, width]`` and bool ``mask`` ``[batch, 1, 1, length]``, true where a
        key counts. Packed: ``[tokens, heads, width]`` and the sequences' bounds, twice: for queries and keys.
        """
        softmax, none = self._trt.AttentionNormalizationOp.SOFTMAX, self._trt.CausalMaskKind.NONE
        layer = self._network.add_attention_v2(q.handle, k.handle, v.handle, softmax, none)
        if layer is None:
            raise EngineBuildFailed(f"TensorRT refused attention over {q}, {k}, {v}")
        layer.decomposable = self._decomposable
        layer.name = f"{self._part} attention {len(self.attentions)}"
        if bounds is not None:
            packed = self._trt.AttentionIOForm.PACKED_NHD
            layer.query_form = layer.key_value_form = packed
            # One tensor in both places crashes TensorRT.
            layer.query_lengths, layer.key_value_lengths = (bound.handle for bound in bounds)
        if mask is not None:
            layer.mask = mask.handle
        self.attentions.append(layer)
        return Node(layer.get_output(0), q.dtype, q.rank)

    # Reductions and norms

    def layer_norm(self, node: Node, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Node:
        """Over the last axis."""
        shape = (*[1] * (node.rank - 1), weight.shape[0])
        scale, shift = (
            self.constant(value.to(DTYPES[node.dtype].torch).view(shape)).handle for value in (weight, bias)
        )
        layer = self._network.add_normalization_v2(node.handle, scale, shift, 1 << (node.rank - 1))
        normed = self._out(layer, node.dtype)
        layer.epsilon = eps
        return normed

    def sum(self, node: Node, axis: int, *, keep: bool = False) -> Node:
        return self._reduce("SUM", node, axis, keep)

    def mean(self, node: Node, axis: int, *, keep: bool = False) -> Node:
        return self._reduce("AVG", node, axis, keep)

    def _reduce(self, name: str, node: Node, axis: int, keep: bool) -> Node:
        operation = getattr(self._trt.ReduceOperation, name)
        return self._out(
            self._network.add_reduce(node.handle, operation, 1 << (axis % node.rank), keep), node.dtype
        )

    # Shapes

    def reshape(self, node: Node, shape: Sequence[int]) -> Node:
        """0 keeps the size of the same axis, one -1 takes what is left."""
        layer = self._network.add_shuffle(node.handle)
        layer.reshape_dims = tuple(shape)
        return self._out(layer, node.dtype)

    def permute(self, node: Node, order: Sequence[int]) -> Node:
        layer = self._network.add_shuffle(node.handle)
        layer.first_transpose = self._trt.Permutation(list(order))
        return self._out(layer, node.dtype)

    def part(self, node: Node, axis: int, start: int, size: int) -> Node:
        layer = self._network.add_slice(node.handle, (start,), (size,), (1,))
        layer.axes = (axis % node.rank,)
        return self._out(layer, node.dtype)

    def drop_ends(self, node: Node) -> tuple[Node, Node]:
        """A one-dimensional tensor without its last, and without its first element."""
        less_one = self.subtract(self._shape(node), 1)
        found = []
        for start in (0, 1):
            layer = self._network.add_slice(node.handle, (start,), (0,), (1,))
            layer.set_input(2, less_one.handle)
            found.append(self._out(layer, node.dtype))
        return found[0], found[1]

    def concatenate(self, nodes: Sequence[Node], axis: int) -> Node:
        layer = self._network.add_concatenation([node.handle for node in nodes])
        layer.axis = axis % nodes[0].rank
        return self._out(layer, nodes[0].dtype)

    def gather(self, table: Node, index: Node) -> Node:
        """Rows of ``table`` along its first axis; every index must lie inside."""
        return self._out(self._network.add_gather(table.handle, index.handle, 0), table.dtype)

    def count(self, node: Node, axis: int) -> Node:
        """int32 ``[0, 1, …]``, as long as an axis of ``node``."""
        size = self.part(self._shape(node), 0, axis % node.rank, 1)
        first = self.constant(torch.tensor(0, dtype=torch.int32))
        step = self.constant(torch.tensor([1], dtype=torch.int32))
        layer = self._network.add_fill((0,), self._trt.FillOperation.LINSPACE, self._trt.int32)
        for number, operand in enumerate((size, first, step)):
            layer.set_input(number, operand.handle)
        return self._out(layer, "int32")

    def _shape(self, node: Node) -> Node:
        return self._out(self._network.add_shape(node.handle), "int64")


def _ones(node: Node, weight: torch.Tensor) -> list[int]:
    return [1] * (node.rank - weight.ndim)
