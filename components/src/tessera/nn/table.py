"""A table of vectors."""

from __future__ import annotations

from torch import nn


class Table(nn.Embedding):
    """``nn.Embedding``, which draws no random numbers where it has no memory for them.

    torch's form of that for the ``meta`` device imports its compiler: a second of every worker's start.
    """

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()
