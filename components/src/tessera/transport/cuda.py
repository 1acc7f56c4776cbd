"""The few CUDA calls that hand-offs need."""

from __future__ import annotations

from typing import Any

import torch

from tessera.errors import HandOffError
from tessera.tasks import Poll

# Not all of it is typed.
_cuda: Any = torch.cuda


async def finished(device: torch.device) -> None:
    """Wait, without blocking the event loop, for what the current stream of ``device`` was given so far."""
    event = _cuda.Event()
    with torch.cuda.device(device):
        event.record(torch.cuda.current_stream())
    poll = Poll()
    while not event.query():
        await poll.pause()


def pin(rows: torch.Tensor) -> None:
    """Page-lock host memory in place, so that copies between it and a device run beside the host."""
    status = int(_cuda.cudart().cudaHostRegister(rows.data_ptr(), rows.numel() * rows.element_size(), 0))
    if status != 0:
        raise HandOffError(f"cannot page-lock the host copy of the slab: CUDA error {status}")


def unpin(rows: torch.Tensor) -> None:
    """Undo ``pin``."""
    _cuda.cudart().cudaHostUnregister(rows.data_ptr())


def index_of(device: torch.device) -> int:
    """The device's index; plain ``cuda`` means the current one."""
    return device.index if device.index is not None else torch.cuda.current_device()
