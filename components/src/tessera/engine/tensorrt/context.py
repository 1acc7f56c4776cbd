"""One TensorRT execution context, with everything checked that TensorRT itself lets pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tessera.engine.compiled.manifest import Binding
from tessera.errors import EngineFailed

# What TensorRT expects of every address.
ALIGNMENT = 256


class Context:
    """Binds tensors to names and runs; ``describe`` tells TensorRT's latest complaint."""

    def __init__(self, context: Any, bindings: Mapping[str, Binding], *, describe: Callable[[], str]) -> None:
        self._context = context
        self._bindings = bindings
        self._describe = describe

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set shapes and addresses of all inputs and outputs; raises ``EngineFailed``.

        TensorRT answers a shape outside the profile with False, and looks at no type at all.
        """
        if set(tensors) != set(self._bindings):
            raise EngineFailed(f"bound were {sorted(tensors)}, the engine has {sorted(self._bindings)}")
        for name, tensor in tensors.items():
            self._check(self._bindings[name], tensor)
            shape = tuple(tensor.shape)
            if not self._bindings[name].output and not self._context.set_input_shape(name, shape):
                raise EngineFailed(
                    f"TensorRT refused the shape {list(shape)} of {name}, which is outside the profile:"
                    f" {self._describe()}"
                )
            if not self._context.set_tensor_address(name, tensor.data_ptr()):
                raise EngineFailed(f"TensorRT refused the address of {name}: {self._describe()}")
        missing = self._context.infer_shapes()
        if missing:
            raise EngineFailed(f"the shapes leave {missing} undetermined")
        for name, binding in self._bindings.items():
            shape = tuple(self._context.get_tensor_shape(name))
            if binding.output and shape != tuple(tensors[name].shape):
                raise EngineFailed(
                    f"output {name} has the shape {list(shape)}, bound was {list(tensors[name].shape)}"
                )

    def run(self, stream: int) -> None:
        """Put the work on a CUDA stream."""
        if not self._context.execute_async_v3(stream):
            raise EngineFailed(f"TensorRT did not run: {self._describe()}")

    def capturable(self, stream: int) -> bool:
        """Whether a graph of what ``run`` does can be recorded; releases that cannot tell are believed."""
        ask = getattr(self._context, "is_stream_capturable", None)
        return True if ask is None else bool(ask(stream))

    def _check(self, binding: Binding, tensor: torch.Tensor) -> None:
        expected = getattr(torch, binding.dtype)
        fits = len(binding.shape) == tensor.ndim and all(
            said in (-1, size) for said, size in zip(binding.shape, tensor.shape, strict=True)
        )
        if tensor.dtype != expected or not fits or not tensor.is_contiguous():
            raise EngineFailed(
                f"{binding.name} is {binding.dtype} {list(binding.shape)}, contiguous; bound was"
                f" {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
            )
        if tensor.data_ptr() % ALIGNMENT:
            raise EngineFailed(f"{binding.name} does not begin on {ALIGNMENT} bytes")
