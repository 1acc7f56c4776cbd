"""The CUDA streams of one engine, a batch launched on them, and copies from the device beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from tessera.launched import Launched

T = TypeVar("T")


class Streams:
    """Neither waits for torch's default stream, nor for the other engine of the process.

    What an engine reads was complete, as seen from the host, when it was handed over; nothing else orders
    the streams of different engines.
    """

    def __init__(self, device: str) -> None:
        self.compute = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def after_copies(self) -> None:
        """Let the compute stream wait for the copies issued so far; the host does not wait."""
        self.compute.wait_stream(self.copies)

    def launched(self, finish: Callable[[], T], *, keep: object) -> Launched[T]:
        """Everything on the compute stream so far as a batch; ``finish`` makes its result."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.compute)
        return Launched.after(event, finish, keep=keep)


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Page-locked host memory.

    torch keeps what is freed and hands it out again once the copies that used it have passed, so a steady
    load allocates nothing.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=True)


class HostCopies:
    """Copies on a stream and a thread of its own, for a cache whose rows go back to the device later.

    The thread waits for each copy, asleep, and page-locks memory that has not been used before; neither
    holds up the caller's event loop. torch rounds page-locked blocks up to a power of two: seven tiles of a
    MiB each occupy eight.
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
            host = pinned(tuple(rows.shape), rows.dtype)
            host.copy_(rows, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
        event.synchronize()
        return host
