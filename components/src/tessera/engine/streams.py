"""The two CUDA streams of one engine: kernels on one, copies to the device on the other."""

from __future__ import annotations

import torch


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


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Page-locked host memory.

    torch keeps what is freed and hands it out again once the copies that used it have passed, so a steady
    load allocates nothing.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=True)
