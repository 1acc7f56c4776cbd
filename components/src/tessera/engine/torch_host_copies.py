"""Device rows to page-locked host memory, beside the engines and off the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch

from tessera.engine.streams import pinned


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
