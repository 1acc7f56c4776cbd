"""Computes what a TensorRT network says, layer by layer in torch, from nothing but its definition.

Follows the documented meaning of each layer, so that a network can be proven right on a machine where no
engine runs. It says nothing about TensorRT's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

FLOAT8_MAX = 448.0

Compute = Callable[[Any, list[torch.Tensor]], torch.Tensor]


class Network:
    """``definition`` is an ``INetworkDefinition``.

    ``weights`` are those of its constants by tensor name, for the types whose bytes TensorRT's Python
    interface does not give back.
    """

    def __init__(self, trt: Any, definition: Any, weights: dict[str, torch.Tensor]) -> None:
        self._trt = trt
        self._definition = definition
        self._weights = weights

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Outputs by name, each of the type and shape that the network declares for it."""
        values: dict[str, torch.Tensor] = {}
        for number in range(self._definition.num_inputs):
            tensor = self._definition.get_input(number)
            self._check(tensor, inputs[tensor.name])
            values[tensor.name] = inputs[tensor.name]
        for number in range(self._definition.num_layers):
            layer = self._definition.get_layer(number)
            kind = layer.type
            # Every layer comes back as its base class, and some of the others hide ``type`` by their own.
            layer.__class__ = self._class(kind.name)
            output = layer.get_output(0)
            compute: Compute = getattr(self, kind.name.lower())
            operands = [
                values[operand.name]
                for place in range(layer.num_inputs)
                if (operand := layer.get_input(place)) is not None
            ]
            self._values = values
            value = compute(layer, operands)
            if kind != self._trt.LayerType.ATTENTION_INPUT:
                self._check(output, value)
            values[output.name] = value
        return {
            (tensor := self._definition.get_output(number)).name: values[tensor.name]
            for number in range(self._definition.num_outputs)
        }

    def _class(self, kind: str) -> type:
        name = "".join(word.capitalize() for word in kind.split("_"))
        irregular = {"Elementwise": "ElementWise", "Softmax": "SoftMax"}
        return getattr(self._trt, f"I{irregular.get(name, name)}Layer")

    def torch_type(self, dtype: Any) -> torch.dtype:
        kinds = self._trt.DataType
        return {
            kinds.FLOAT: torch.float32,
            kinds.HALF: torch.float16,
            kinds.BF16: torch.bfloat16,
            kinds.FP8: torch.float8_e4m3fn,
            kinds.INT32: torch.int32,
            kinds.INT64: torch.int64,
            kinds.UINT8: torch.uint8,
            kinds.BOOL: torch.bool,
        }[dtype]

    def _check(self, tensor: Any, value: torch.Tensor) -> None:
        declared = tuple(tensor.shape)
        assert value.dtype == self.torch_type(tensor.dtype), (tensor.name, value.dtype, tensor.dtype)
        assert len(declared) == value.ndim, (tensor.name, declared, value.shape)
        for said, found in zip(declared, value.shape, strict=True):
            assert said in (-1, found), (tensor.name, declared, value.shape)

    def constant(self, layer: Any, _: list[torch.Tensor]) -> torch.Tensor:
        if isinstance(layer.weights, np.ndarray):
            return torch.from_numpy(layer.weights.copy()).reshape(tuple(layer.shape))
        return self._weights[layer.get_output(0).name]

    def cast(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        return operands[0].to(self.torch_type(layer.get_output(0).dtype))

    def identity(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        return operands[0]

    def shuffle(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        value = operands[0].permute(_permutation(layer.first_transpose, operands[0].ndim))
        if layer.reshape_dims is not None:
            assert layer.zero_is_placeholder
            sizes = enumerate(layer.reshape_dims)
            value = value.reshape([value.shape[at] if size == 0 else size for at, size in sizes])
        return value.permute(_permutation(layer.second_transpose, value.ndim))

    def unsqueeze(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        (axis,) = operands[1].tolist()
        return operands[0].unsqueeze(axis)

    def slice(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        value = operands[0]
        axes = layer.axes or range(value.ndim)
        assert all(step == 1 for step in layer.stride)
        sizes = operands[1].tolist() if len(operands) > 1 else list(layer.shape)
        for axis, start, size in zip(axes, layer.start, sizes, strict=True):
            value = value.narrow(axis, start, size)
        return value

    def concatenation(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(operands, layer.axis)

    def shape(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor(operands[0].shape, dtype=torch.int64)

    def fill(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        assert layer.operation == self._trt.FillOperation.LINSPACE
        (size,), start, step = operands[0].tolist(), int(operands[1]), int(operands[2])
        return (start + step * torch.arange(size)).to(self.torch_type(layer.get_output(0).dtype))

    def gather(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        table, index = operands
        assert layer.axis == 0 and layer.mode == self._trt.GatherMode.DEFAULT
        assert int(index.min()) >= 0 and int(index.max()) < len(table)
        return table[index.long()]

    def matrix_multiply(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        turn = self._trt.MatrixOperation.TRANSPOSE
        a, b = (
            value.transpose(-1, -2) if op == turn else value
            for value, op in zip(operands, (layer.op0, layer.op1), strict=True)
        )
        return a @ b

    def elementwise(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        a, b = operands
        assert a.dtype == b.dtype and a.ndim == b.ndim, layer.name
        operations = {
            "SUM": torch.add,
            "SUB": torch.sub,
            "PROD": torch.mul,
            "DIV": torch.div,
            "MAX": torch.maximum,
            "MIN": torch.minimum,
            "LESS": torch.lt,
            "AND": torch.logical_and,
        }
        return operations[layer.op.name](a, b)

    def unary(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        return {"NOT": torch.logical_not, "ISNAN": torch.isnan, "SQRT": torch.sqrt}[layer.op.name](
            operands[0]
        )

    def activation(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        def gelu_tanh(value: torch.Tensor) -> torch.Tensor:
            return functional.gelu(value, approximate="tanh")

        kinds = {
            "GELU_ERF": functional.gelu,
            "GELU_TANH": gelu_tanh,
            "SIGMOID": torch.sigmoid,
            "RELU": torch.relu,
        }
        return kinds[layer.type.name](operands[0])

    def normalization(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        value, scale, shift = operands
        assert layer.axes == 1 << (value.ndim - 1)
        return functional.layer_norm(value, value.shape[-1:], eps=layer.epsilon) * scale + shift

    def reduce(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        (axis,) = [axis for axis in range(operands[0].ndim) if layer.axes >> axis & 1]
        operation = {"SUM": torch.sum, "AVG": torch.mean}[layer.op.name]
        return operation(operands[0], axis, keepdim=layer.keep_dims)

    def select(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        assert operands[1].dtype == operands[2].dtype
        return torch.where(*operands)

    def quantize(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        value, scale = operands
        return (value.float() / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)

    def dequantize(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        value, scale = operands
        return (value.float() * scale).to(self.torch_type(layer.get_output(0).dtype))

    def attention_input(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        attention = layer.attention
        if attention.query_form == self._trt.AttentionIOForm.PADDED_BHND:
            mask = None if attention.mask is None else self._values[attention.mask.name]
            return _attend(*operands[:3], mask)
        bounds = [
            self._values[tensor.name] for tensor in (attention.query_lengths, attention.key_value_lengths)
        ]
        assert attention.query_lengths.name != attention.key_value_lengths.name
        assert torch.equal(*bounds) and int(bounds[0][0]) == 0
        out = torch.full_like(operands[0], float("nan"))
        for start, end in bounds[0].unfold(0, 2, 1).tolist():
            if start < end:
                q, k, v = (value[start:end].transpose(0, 1)[None] for value in operands[:3])
                out[start:end] = _attend(q, k, v, None)[0].transpose(0, 1)
        return out

    def attention_output(self, layer: Any, operands: list[torch.Tensor]) -> torch.Tensor:
        return operands[0]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (value.repeat_interleave(group, 1).float() for value in (k, v))
    scores = q.float() @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -float("inf"))
    return (scores.softmax(-1) @ v).to(q.dtype)


def _permutation(value: Any, rank: int) -> list[int]:
    return list(value)[:rank]
