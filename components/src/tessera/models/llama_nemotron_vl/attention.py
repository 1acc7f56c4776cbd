"""Full attention inside each sequence of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from tessera.nn.fused import uses_fused


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lengths: Sequence[int],
) -> torch.Tensor:
    """Attend within each sequence, both ways, scaled by ``head_dim ** -0.5``.

    ``q`` is ``[total, heads, head_dim]``, ``k`` and ``v`` ``[total, kv_heads, head_dim]`` with ``heads`` a
    multiple of ``kv_heads``; ``cu_seqlens`` int32 ``[batch + 1]`` bounds the sequences, and ``lengths`` says
    the same on the host, so that nothing has to wait for the device. Returns ``[total, heads, head_dim]``.
    """
    if uses_fused(q.device, q.dtype):
        from tessera.nn.kernels.attention import packed_attention, supports

        if supports(q.shape[2]):
            return packed_attention(q, k, v, cu_seqlens, max(lengths))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = _expand(k, groups), _expand(v, groups)
    if q.is_cuda and q.dtype != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        longest = max(lengths)
        packed = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest)
        return packed if isinstance(packed, torch.Tensor) else packed[0]
    if len(set(lengths)) == 1:
        return _equal_lengths(q, k, v, len(lengths))
    return _by_length(q, k, v, lengths)


def _expand(heads: torch.Tensor, groups: int) -> torch.Tensor:
    total, count, width = heads.shape
    return heads[:, :, None, :].expand(total, count, groups, width).reshape(total, count * groups, width)


def _equal_lengths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: int) -> torch.Tensor:
    length = q.shape[0] // batch
    queries, keys, values = (x.view(batch, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(0, 1)


def _by_length(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """One call for each distinct length, over views of the packed rows where a length occurs once."""
    starts: dict[int, list[int]] = {}
    offset = 0
    for length in lengths:
        starts.setdefault(length, []).append(offset)
        offset += length
    out = torch.empty_like(q)
    for length, offsets in starts.items():
        slices = [slice(start, start + length) for start in offsets]
        if len(slices) == 1:
            out[slices[0]] = _equal_lengths(q[slices[0]], k[slices[0]], v[slices[0]], 1)
            continue
        queries, keys, values = (torch.cat([x[where] for where in slices]) for x in (q, k, v))
        attended = _equal_lengths(queries, keys, values, len(slices))
        for where, rows in zip(slices, attended.view(len(slices), length, *q.shape[1:]), strict=True):
            out[where] = rows
    return out
