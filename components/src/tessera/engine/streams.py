"""The CUDA streams of an engine: one for copies, one for everything else, and graphs recorded on that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

import numpy as np
import torch

from tessera.launched import Launched
from tessera.settings import MIB

log = logging.getLogger(__name__)

T = TypeVar("T")


class CudaStreams:
    """The order of an engine's copies and runs, which one thread drives; graphs share one pool of memory.

    Neither stream waits for torch's default stream, nor for the other engine of the process. What an engine
    reads was complete, as seen from the host, when it was handed over; nothing else orders the streams of
    different engines.
    """

    def __init__(self, device: str) -> None:
        self._compute = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def handle(self) -> int:
        """The address of the compute stream, as TensorRT takes it."""
        return int(self._compute.cuda_stream)

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that copies to and from the device need not wait for."""
        return _pinned(shape, dtype)

    def copying(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._copies)

    def computing(self) -> AbstractContextManager[object]:
        """Use the compute stream, behind the copies issued so far; the host does not wait."""
        self._compute.wait_stream(self._copies)
        return torch.cuda.stream(self._compute)

    def record(self, compute: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record ``compute``; returns what replays it in one launch, and the result that it overwrites."""
        # The first run compiles kernels, builds plans and allocates, which must not happen while recording.
        compute()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._compute, capture_error_mode="thread_local"
        ):
            result = compute()
        return graph.replay, result

    def launched(self, finish: Callable[[], T], *, keep: object) -> Launched[T]:
        """A batch of everything on the compute stream so far.

        ``keep`` is what it reads and writes; ``finish`` makes its result.
        """
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._compute)
        return Launched.after(event, finish, keep=keep)

    def synchronize(self) -> None:
        """Wait for both streams."""
        self._copies.synchronize()
        self._compute.synchronize()


def sendable(tensor: torch.Tensor, streams: CudaStreams) -> torch.Tensor:
    """Return the tensor itself, or a copy in staging memory if it lies in pageable memory.

    A copy from pageable memory would make the host wait for the stream.
    """
    if tensor.is_cuda or tensor.is_pinned():
        return tensor
    staged = streams.staging(tuple(tensor.shape), tensor.dtype)
    # Through numpy, which copies on this thread: torch would wake one for each core, and each would spin.
    np.copyto(staged.view(torch.uint8).numpy(), tensor.contiguous().view(torch.uint8).numpy())
    return staged


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Page-locked host memory.

    torch keeps what is freed and hands it out again once the copies that used it have passed, so a steady
    load allocates nothing.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def reserve_pinned(nbytes: int) -> None:
    """Page-lock that much host memory at once, for all that is page-locked later; the first to ask decides.

    A cache of rows grows by a block for each image. Page-locking one takes a millisecond in which no other
    thread can launch anything: while 8 GiB filled with rows of 4 MiB, an H200 encoded 224 images a second,
    and 320 afterwards. Call it before any memory has been page-locked. What does not fit any more is
    page-locked block by block, and so is everything where a torch knows no such reserve or the system
    refuses it.
    """
    configure: Callable[[str], None] | None = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None:
        return
    mib = -(-nbytes // MIB)
    # Eight threads touch the pages.
    configure("pinned_use_cuda_host_register:True,pinned_num_register_threads:8")
    configure(f"pinned_reserve_segment_size_mb:{mib}")
    try:
        _pinned((1,), torch.uint8)
    except RuntimeError as error:
        log.warning("cannot page-lock %d MiB at once: %s", mib, error)
        configure("pinned_reserve_segment_size_mb:0")


class HostCopies:
    """Copies on a stream and a thread of its own, for a cache whose rows go back to the device later.

    The thread waits for each copy, asleep, and page-locks memory that has not been used before; neither
    holds up the caller's event loop. torch rounds page-locked blocks up to a power of two: an image's rows of
    7 MiB occupy eight.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-copies")

    async def copy(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows in host memory, ``rows`` itself if it lies there; they must be complete already."""
        if not rows.is_cuda:
            return rows
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._copy, rows)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _copy(self, rows: torch.Tensor) -> torch.Tensor:
        if self._stream is None:
            self._stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            host = _pinned(tuple(rows.shape), rows.dtype)
            host.copy_(rows, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
        event.synchronize()
        return host
