"""The residual stream."""

from __future__ import annotations

import torch


class Residual:
    """The rows ``[tokens, width]`` that every block reads and adds to.

    ``pending``, in the rows' shape, is what is to be added before the next block reads them: an FP8 product
    cannot add to its output, and the norm that follows reads both anyway.
    """

    __slots__ = ("pending", "rows")

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.pending: torch.Tensor | None = None

    def settled(self) -> torch.Tensor:
        """The rows with nothing pending."""
        if self.pending is not None:
            self.rows.add_(self.pending)
            self.pending = None
        return self.rows
