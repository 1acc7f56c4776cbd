"""Copying rows without holding the event loop for long."""

from __future__ import annotations

import asyncio
from typing import Final

import torch

CHUNK_BYTES: Final = 2 << 20


async def copy_rows(source: torch.Tensor, into: torch.Tensor) -> None:
    """Copy ``[rows, hidden]`` piece by piece; other work of the loop runs between the pieces."""
    rows = max(1, CHUNK_BYTES // max(1, source.shape[1] * source.element_size()))
    for first in range(0, source.shape[0], rows):
        if first:
            await asyncio.sleep(0)
        into[first : first + rows].copy_(source[first : first + rows])
