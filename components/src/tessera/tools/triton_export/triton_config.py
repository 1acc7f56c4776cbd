"""``config.pbtxt`` of the models of a Triton repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera.models.stages import StageTensor

_TYPES = {
    "uint8": "TYPE_UINT8",
    "int32": "TYPE_INT32",
    "float32": "TYPE_FP32",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
}
_DELAY_MICROSECONDS = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model; with ``max_batch`` 0 the first axis is an axis like any other.

    ``batched`` lets Triton wait for more requests; ``ragged`` lets these differ in their open axes.
    """

    name: str
    backend: str
    max_batch: int
    inputs: Sequence[StageTensor]
    outputs: Sequence[StageTensor]
    optional: frozenset[str] = frozenset()
    parameters: Mapping[str, str] | None = None
    batched: bool = False
    ragged: bool = False

    def text(self) -> str:
        lines = [
            f'name: "{self.name}"',
            f'backend: "{self.backend}"',
            f"max_batch_size: {self.max_batch}",
            *(self._tensor("input", tensor) for tensor in self.inputs),
            *(self._tensor("output", tensor) for tensor in self.outputs),
        ]
        if self.batched:
            preferred = ", ".join(str(size) for size in (4, 8, 16, 32, 64) if size <= self.max_batch)
            sizes = f"  preferred_batch_size: [ {preferred} ]\n" if preferred else ""
            delay = f"  max_queue_delay_microseconds: {_DELAY_MICROSECONDS}\n"
            lines.append(f"dynamic_batching {{\n{sizes}{delay}}}")
        for key, value in (self.parameters or {}).items():
            lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
        return "\n".join(lines) + "\n"

    def _tensor(self, kind: str, tensor: StageTensor) -> str:
        axes = tensor.axes[1:] if self.max_batch else tensor.axes
        dims = ", ".join(str(axis) if isinstance(axis, int) else "-1" for axis in axes)
        # A tensor needs one dimension beside the batch.
        shape = f"dims: [ {dims} ]" if axes else "dims: [ 1 ] reshape { shape: [ ] }"
        extra = " optional: true" if tensor.name in self.optional else ""
        if kind == "input" and self.ragged:
            extra += " allow_ragged_batch: true"
        return f'{kind} {{ name: "{tensor.name}" data_type: {_TYPES[tensor.dtype]} {shape}{extra} }}'
