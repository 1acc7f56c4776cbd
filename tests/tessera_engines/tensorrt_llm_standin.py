"""A stand-in for ``tensorrt_llm``, which cannot be installed here: its encoder interface and its handles.

Run as a program, it is a process that shares rows of its own: it prints a handle as JSON and lives until its
standard input ends. Only handles to host memory can be made without a GPU; those to device memory have the
same shape, with torch's CUDA fields.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import get_sharing_strategy, reductions, set_sharing_strategy


def handle_of(rows: torch.Tensor) -> dict[str, Any]:
    """The dictionary that TensorRT-LLM makes of a host tensor; the tensor must outlive it."""
    strategy = get_sharing_strategy()
    set_sharing_strategy("file_system")
    try:
        _, shared = reductions.reduce_storage(rows.untyped_storage())
    finally:
        set_sharing_strategy(strategy)
    manager, storage, nbytes = shared[1:4]
    return {
        "method_key": 2,
        "tensor_storage_offset": rows.storage_offset(),
        "tensor_size": list(rows.shape),
        "tensor_stride": list(rows.stride()),
        "manager_handle": base64.b64encode(manager).decode(),
        "storage_handle": base64.b64encode(storage).decode(),
        "storage_size": nbytes // rows.element_size(),
        "storage_dtype": str(rows.dtype),
    }


class Output:
    """A ``RequestOutput`` that is complete once it was waited for."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self.finished = False
        self.disaggregated_params: Any = None

    def result(self, timeout: float | None = None) -> Output:
        self.finished = True
        self.disaggregated_params = SimpleNamespace(multimodal_embedding_handles=[handle_of(self._rows)])
        return self


class MultimodalEncoder:
    """Takes the documented arguments; ``compute`` stands for the model."""

    compute: Callable[[Mapping[str, Any]], torch.Tensor]
    latest: MultimodalEncoder

    def __init__(
        self,
        model: str,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        *,
        max_batch_size: int | None = None,
    ) -> None:
        self.arguments = {"model": model, "dtype": dtype, "max_batch_size": max_batch_size}
        self.open = True
        type(self).latest = self

    def generate_async(self, inputs: Mapping[str, Any]) -> Output:
        assert set(inputs) == {"prompt", "multi_modal_data"}
        return Output(type(self).compute(inputs))

    def shutdown(self) -> None:
        self.open = False


def main() -> None:
    rows = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    print(json.dumps(handle_of(rows)), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
