"""The few CUDA calls that hand-offs need."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from tessera.errors import HandOffError

# Not all of it is typed.
_cuda: Any = torch.cuda


async def finished(device: torch.device) -> None:
    """Wait, without blocking the event loop, for what the current stream of ``device`` was given so far."""
    event = _cuda.Event()
    event.record(torch.cuda.current_stream(device))
    pause = 0.0
    while not event.query():
        await asyncio.sleep(pause)
        pause = min(pause + 2e-5, 1e-3)


def pin(rows: torch.Tensor) -> None:
    """Page-lock host memory in place, so that copies between it and a device run beside the host."""
    status = int(_cuda.cudart().cudaHostRegister(rows.data_ptr(), rows.numel() * rows.element_size(), 0))
    if status != 0:
        raise HandOffError(f"cannot page-lock the host copy of the slab: CUDA error {status}")


def unpin(rows: torch.Tensor) -> None:
    _cuda.cudart().cudaHostUnregister(rows.data_ptr())
