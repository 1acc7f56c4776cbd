"""Vision rows as tensors: their types' names, checks, copies and checksums."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Final

import torch
from blake3 import blake3

from tessera.dtypes import FLOATS
from tessera.errors import HandOffError
from tessera.wire import Handle

TORCH_DTYPES: Final = {name: dtype.torch for name, dtype in FLOATS.items()}
"""The torch type of each element type that crosses, by its wire name."""

CHUNK_BYTES: Final = 2 << 20
"""What ``copy_rows`` moves before it lets other work of the loop run."""


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name of ``dtype``; ``ValueError`` for one that does not cross."""
    for name, known in TORCH_DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"{dtype} rows cannot be handed off; known are {', '.join(TORCH_DTYPES)}")


def check_destination(handle: Handle, into: torch.Tensor) -> None:
    """Raise ``HandOffError`` unless ``into`` is exactly what the handle's rows fill."""
    if into.dtype != TORCH_DTYPES[handle.dtype]:
        raise HandOffError(f"the handle's dtype is {handle.dtype}, the destination's {into.dtype}")
    if tuple(into.shape) != handle.shape:
        raise HandOffError(f"the handle's shape is {handle.shape}, the destination's {tuple(into.shape)}")
    if not into.is_contiguous():
        raise HandOffError("the destination is not contiguous")


async def copy_rows(source: torch.Tensor, into: torch.Tensor) -> None:
    """Copy contiguous ``[rows, row_width]`` in pieces, between which other work of the event loop runs."""
    rows = max(1, CHUNK_BYTES // (source.shape[1] * source.element_size()))
    for first in range(0, source.shape[0], rows):
        if first:
            await asyncio.sleep(0)
        _copy(source[first : first + rows], into[first : first + rows])


def _copy(source: torch.Tensor, into: torch.Tensor) -> None:
    if source.device.type == "cpu" and into.device.type == "cpu":
        # torch would split the copy over its threads and wait for the slowest: on a busy host that
        # costs milliseconds for what one thread moves in tens of microseconds.
        ctypes.memmove(into.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
    else:
        into.copy_(source)


def rows_checksum(rows: torch.Tensor) -> bytes:
    """The 16-byte blake3 hash of ``[rows, row_width]``; a tensor on a device is copied to the host for it."""
    return blake3(rows.detach().contiguous().cpu().view(torch.uint8).numpy().data).digest(16)
