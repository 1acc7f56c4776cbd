"""From the last hidden states of a packed batch to one vector for each sequence."""

from __future__ import annotations

import torch

from tessera.models.llama_nemotron_vl.config import Pooling
from tessera.nn.fused import uses_fused


def pool(hidden: torch.Tensor, cu_seqlens: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Pool ``[total, hidden]`` of any float type over each sequence; float32 ``[batch, hidden]``.

    The mean is accumulated in float32. Sequences are never added to one another's sums, not even with
    weight zero, so that a sequence with a NaN spoils only its own vector.
    """
    if pooling == "cls":
        return hidden.index_select(0, cu_seqlens[:-1]).float()
    if pooling == "last":
        return hidden.index_select(0, cu_seqlens[1:] - 1).float()
    if uses_fused(hidden.device, hidden.dtype):
        from tessera.nn.kernels.mean import segment_mean

        return segment_mean(hidden, cu_seqlens)
    lengths = cu_seqlens.diff()
    batch, total = lengths.shape[0], hidden.shape[0]
    sequence = torch.arange(batch, device=hidden.device, dtype=torch.int32).repeat_interleave(
        lengths,
        output_size=total,  # given, so that the device is not asked for it
    )
    sums = torch.zeros(batch, hidden.shape[1], dtype=torch.float32, device=hidden.device)
    sums.index_add_(0, sequence, hidden.float())
    return sums / lengths[:, None]
