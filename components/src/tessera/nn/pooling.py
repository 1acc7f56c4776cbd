"""From the last hidden states of a packed batch to the rows of its output."""

from __future__ import annotations

import torch

from tessera.nn.block import Block
from tessera.nn.spec import Pooling


class Pool(Block):
    """One row for each sequence, or with ``none`` one for each token."""

    def __init__(self, pooling: Pooling) -> None:
        super().__init__()
        self._pooling = pooling

    def forward(self, hidden: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """``[tokens, width]`` of any float type and int32 bounds ``[batch + 1]`` to float32."""
        if self._pooling == "none":
            return hidden.float()
        if self._pooling == "first":
            return hidden.index_select(0, cu_seqlens[:-1]).float()
        if self._pooling == "last":
            return hidden.index_select(0, cu_seqlens[1:] - 1).float()
        return self.form.means(hidden, cu_seqlens)
