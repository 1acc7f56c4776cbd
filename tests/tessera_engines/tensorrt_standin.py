"""A stand-in for TensorRT's runtime, because no engine can run where there is no GPU that it supports.

Deserialising gives an engine that computes the network's definition on the host, from and to the memory that
was bound. It is silent where TensorRT is silent: a shape outside the profile gives False, no type is looked
at, and nothing is said about an address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import torch

from tessera.engine.streams import CudaStreams
from tessera.launched import Launched
from tests.references.tensorrt_network import Network

T = TypeVar("T")


class StandInEngine:
    """Offers what ``ICudaEngine`` does; ``definition`` is the network that it was made from."""

    def __init__(self, trt: Any, definition: Any, network: Network, ranges: list[dict[str, Any]]) -> None:
        self.trt, self.definition, self.network, self.ranges = trt, definition, network, ranges
        self.inputs = [definition.get_input(number) for number in range(definition.num_inputs)]
        self.outputs = [definition.get_output(number) for number in range(definition.num_outputs)]
        self.tensors = {tensor.name: tensor for tensor in self.inputs + self.outputs}
        self.contexts: list[StandInContext] = []

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.ranges)

    def get_tensor_name(self, number: int) -> str:
        return list(self.tensors)[number]

    def get_tensor_mode(self, name: str) -> Any:
        modes = self.trt.TensorIOMode
        return modes.INPUT if any(tensor.name == name for tensor in self.inputs) else modes.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return self.tensors[name].dtype

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def get_device_memory_size_for_profile_v2(self, number: int) -> int:
        return 1024

    def create_runtime_config(self) -> StandInRuntimeConfig:
        return StandInRuntimeConfig()

    def create_execution_context(self, how: Any) -> StandInContext:
        strategy = how.strategy if isinstance(how, StandInRuntimeConfig) else how
        assert strategy == self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self.contexts.append(StandInContext(self))
        return self.contexts[-1]


@dataclass
class StandInContext:
    """Offers what ``IExecutionContext`` does, and counts."""

    engine: StandInEngine
    profile: int = -1
    memory: tuple[int, int] = (0, 0)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)
    runs: int = 0

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = (address, size)

    def set_optimization_profile_async(self, number: int, stream: int) -> bool:
        self.profile = number
        return number < self.engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.engine.ranges[self.profile][name]
        self.shapes[name] = shape
        return all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def infer_shapes(self) -> list[str]:
        return [tensor.name for tensor in self.engine.inputs if tensor.name not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.shapes:
            return self.shapes[name]
        sizes = {}
        for tensor in self.engine.inputs:
            for axis, size in enumerate(self.shapes[tensor.name]):
                sizes[tensor.get_dimension_name(axis)] = size
        first = sizes["units"] if "units" in sizes else sizes.get("sequences", sizes.get("sequences1", 0))
        if "sequences" not in sizes and "sequences1" in sizes:
            first = sizes["sequences1"] - 1
        return tuple(first if size == -1 else size for size in self.engine.get_tensor_shape(name))

    def execute_async_v3(self, stream: int) -> bool:
        self.runs += 1
        inputs = {
            tensor.name: self._memory(tensor.name, self.shapes[tensor.name]) for tensor in self.engine.inputs
        }
        for name, value in self.engine.network(**inputs).items():
            self._memory(name, tuple(value.shape)).copy_(value)
        return True

    def _memory(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = self.engine.network.torch_type(self.engine.tensors[name].dtype)
        held = (ctypes.c_char * (prod(shape) * dtype.itemsize)).from_address(self.addresses[name])
        return torch.frombuffer(held, dtype=dtype).view(shape)


class StandInRuntimeCache:
    """What TensorRT for RTX compiled; takes only bytes that begin as its own do."""

    def __init__(self) -> None:
        self.content = b"compiled"

    def deserialize(self, blob: bytes) -> bool:
        fits = blob.startswith(b"compiled")
        if fits:
            self.content = blob + b" again"
        return fits

    def serialize(self) -> bytes:
        return self.content


class StandInRuntimeConfig:
    """Offers what ``IRuntimeConfig`` does."""

    strategy: Any = None
    cache: StandInRuntimeCache | None = None
    dynamic_shapes_kernel_specialization_strategy: Any = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> StandInRuntimeCache:
        return StandInRuntimeCache()

    def set_runtime_cache(self, cache: StandInRuntimeCache) -> bool:
        self.cache = cache
        return True


class HostStreams(CudaStreams):
    """Streams whose work is done at once; graphs are what they repeat, and are counted."""

    handle = 7

    def __init__(self) -> None:
        self.replayed = 0

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def copying(self) -> AbstractContextManager[object]:
        return nullcontext()

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, compute: Callable[[], T]) -> tuple[Callable[[], None], T]:
        def replay() -> None:
            self.replayed += 1
            again = compute()
            if isinstance(result, torch.Tensor):
                result.copy_(again)

        result = compute()
        return replay, result

    def launched(self, finish: Callable[[], T], *, keep: object) -> Launched[T]:
        return Launched(finish)

    def synchronize(self) -> None:
        return None
