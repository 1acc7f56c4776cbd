"""Copying rows without holding the event loop for long."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Final

import torch

CHUNK_BYTES: Final = 2 << 20


async def copy_rows(source: torch.Tensor, into: torch.Tensor) -> None:
    """Copy contiguous ``[rows, hidden]``; other work of the loop runs between the pieces."""
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
