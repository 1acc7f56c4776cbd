"""Where a TensorRT engine's work goes: two CUDA streams, and graphs recorded on one of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch

from tessera.engine.streams import Streams, pinned
from tessera.launched import Launched

T = TypeVar("T")


class Lane(Protocol):
    """The order in which copies and runs happen; the engines know no more of a device."""

    @property
    def handle(self) -> int:
        """The stream that runs go to, as TensorRT wants it."""
        ...

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that copies to and from the device need not wait for."""
        ...

    def copying(self) -> AbstractContextManager[object]: ...

    def computing(self) -> AbstractContextManager[object]:
        """What is put on the lane here comes after the copies so far."""
        ...

    def record(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """What repeats ``run`` with one launch; None where it cannot be recorded."""
        ...

    def launched(self, finish: Callable[[], T], *, keep: object) -> Launched[T]:
        """Everything so far as a batch; ``keep`` is what it reads and writes, ``finish`` makes its result."""
        ...

    def settle(self) -> None:
        """Wait for everything."""
        ...


class CudaLane:
    """Implements ``Lane``; driven by one thread."""

    def __init__(self, device: str) -> None:
        self._streams = Streams(device)
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def handle(self) -> int:
        return int(self._streams.compute.cuda_stream)

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return pinned(shape, dtype)

    def copying(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams.copies)

    def computing(self) -> AbstractContextManager[object]:
        self._streams.after_copies()
        return torch.cuda.stream(self._streams.compute)

    def record(self, run: Callable[[], None]) -> Callable[[], None] | None:
        run()  # TensorRT allocates and compiles at the first run, which must not happen while recording
        self.settle()
        graph = torch.cuda.CUDAGraph()
        stream = self._streams.compute
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def launched(self, finish: Callable[[], T], *, keep: object) -> Launched[T]:
        return self._streams.launched(finish, keep=keep)

    def settle(self) -> None:
        self._streams.copies.synchronize()
        self._streams.compute.synchronize()
