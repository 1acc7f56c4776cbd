"""The sequences of a batch, as attention sees them: which rows may look at which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention


class Sequences(Protocol):
    """What a batch is made of; one implementation for each way in which sequences lie."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        """Attend within each sequence, both ways or only back, scaled by ``head_dim ** -0.5``.

        ``q`` is ``[tokens, heads, head_dim]``, ``k`` and ``v`` ``[tokens, kv_heads, head_dim]`` with
        ``heads`` a multiple of ``kv_heads``. Returns ``[tokens, heads, head_dim]``.
        """
        ...


class Packed:
    """Sequences end to end.

    ``cu_seqlens`` int32 ``[batch + 1]`` bounds them, and ``lengths`` says the same on the host, so that
    nothing has to wait for the device.
    """

    __slots__ = ("cu_seqlens", "lengths")

    def __init__(self, cu_seqlens: torch.Tensor, lengths: Sequence[int]) -> None:
        self.cu_seqlens = cu_seqlens
        self.lengths = lengths

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        k, v = grouped(q, k), grouped(q, v)
        if q.is_cuda and q.dtype != torch.float32 and not causal:
            from torch.nn.attention.varlen import varlen_attn

            longest, bounds = max(self.lengths), self.cu_seqlens
            packed = varlen_attn(q, k, v, bounds, bounds, longest, longest)
            return packed if isinstance(packed, torch.Tensor) else packed[0]
        if len(set(self.lengths)) == 1:
            return _equal_lengths(q, k, v, self.lengths[0], causal)
        return _by_length(q, k, v, self.lengths, causal)


class Equal:
    """Sequences end to end that are all of one length."""

    __slots__ = ("length",)

    def __init__(self, length: int) -> None:
        self.length = length

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return _equal_lengths(q, grouped(q, k), grouped(q, v), self.length, causal)


class Padded:
    """Sequences of one shape, padded on the right; ``mask`` bool ``[sequences, tokens]`` is true for tokens.

    Every sequence has at least one token. Rows are those of all sequences, padding included.
    """

    __slots__ = ("mask",)

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        sequences, tokens = self.mask.shape
        queries, keys, values = (
            x.view(sequences, tokens, *x.shape[1:]).transpose(1, 2) for x in (q, grouped(q, k), grouped(q, v))
        )
        mask = self.mask[:, None, None, :]
        if causal:
            at = torch.arange(tokens, device=q.device)
            mask = mask & (at[None, :] <= at[:, None])
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return attended.transpose(1, 2).flatten(0, 1)


class Masked:
    """Sequences end to end whose lengths are not known to the host; ``sequence`` ``[tokens]`` numbers them.

    Attention is over the whole batch with a mask, which costs its square and lets a sequence that is no
    number spoil the others: good for comparisons and small batches, not for a service.
    """

    __slots__ = ("sequence",)

    def __init__(self, sequence: torch.Tensor) -> None:
        self.sequence = sequence

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        mask = self.sequence[:, None] == self.sequence
        if causal:
            at = torch.arange(q.shape[0], device=q.device)
            mask = mask & (at[None, :] <= at[:, None])
        queries, keys, values = (x[None].transpose(1, 2) for x in (q, grouped(q, k), grouped(q, v)))
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=mask[None, None])
        return attended.transpose(1, 2).squeeze(0)


def grouped(q: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Keys or values ``[tokens, kv_heads, head_dim]`` repeated for each head of the queries."""
    tokens, count, width = heads.shape
    groups = q.shape[1] // count
    if groups == 1:
        return heads
    return heads[:, :, None, :].expand(tokens, count, groups, width).reshape(tokens, count * groups, width)


def _equal_lengths(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, causal: bool
) -> torch.Tensor:
    queries, keys, values = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    attended = scaled_dot_product_attention(queries, keys, values, is_causal=causal)
    return attended.transpose(1, 2).flatten(0, 1)


def _by_length(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], causal: bool
) -> torch.Tensor:
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
            out[slices[0]] = _equal_lengths(q[slices[0]], k[slices[0]], v[slices[0]], length, causal)
            continue
        queries, keys, values = (torch.cat([x[where] for where in slices]) for x in (q, k, v))
        attended = _equal_lengths(queries, keys, values, length, causal)
        for where, rows in zip(slices, attended.view(len(slices), length, *q.shape[1:]), strict=True):
            out[where] = rows
    return out
