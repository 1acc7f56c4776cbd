"""The sequences of a batch: which rows may look at which, and what is pooled of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from tessera.nn.spec import Pooling

_AttendEqual = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Sequence[int]], torch.Tensor]
"""Attends in sequences of one length, which is the fourth, end to end; the last are their numbers."""


class Sequences(Protocol):
    """What a batch is made of; one implementation for each way in which sequences lie."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        """Attend within each sequence, both ways or only back, scaled by ``head_dim ** -0.5``.

        ``q`` is ``[tokens, heads, head_dim]``, ``k`` and ``v`` ``[tokens, kv_heads, head_dim]`` with
        ``heads`` a multiple of ``kv_heads``. Returns ``[tokens, heads, head_dim]``.
        """
        ...

    def mean(self, rows: torch.Tensor) -> torch.Tensor:
        """The mean of ``[tokens, width]`` over each sequence, accumulated in float32: ``[batch, width]``.

        A sequence with a NaN spoils only its own mean. An empty one gives NaN.
        """
        ...

    def first(self, rows: torch.Tensor) -> torch.Tensor:
        """The first row of each sequence."""
        ...

    def last(self, rows: torch.Tensor) -> torch.Tensor:
        """The last row of each sequence."""
        ...

    def largest(self, rows: torch.Tensor) -> torch.Tensor:
        """The largest number of each column over each sequence, float32 ``[batch, width]``."""
        ...

    def counts(self, rows: torch.Tensor) -> torch.Tensor:
        """How many rows each sequence has: ``[batch, 1]``, or ``[1, 1]`` where all have as many."""
        ...

    def places(self, rows: torch.Tensor) -> torch.Tensor:
        """The place of each row in its sequence, from 1: float32 ``[tokens, 1]``."""
        ...


class Bounded:
    """Sequences end to end, by int32 bounds ``[batch + 1]``; rows behind the last bound belong to none."""

    __slots__ = ("cu_seqlens",)

    def __init__(self, cu_seqlens: torch.Tensor) -> None:
        self.cu_seqlens = cu_seqlens

    def mean(self, rows: torch.Tensor) -> torch.Tensor:
        # Sequences are never added to one another's sums, not even with weight zero.
        batch = self.cu_seqlens.shape[0] - 1
        sums = torch.zeros(batch + 1, rows.shape[1], dtype=torch.float32, device=rows.device)
        sums = sums.index_add(0, self.numbers(rows.shape[0]), rows.float())
        return sums[:-1] / self.counts(rows)

    def first(self, rows: torch.Tensor) -> torch.Tensor:
        # Empty sequences may stand behind the last row, where a CUDA graph has room for more of them.
        return rows.index_select(0, self.starts().clamp(max=rows.shape[0] - 1))

    def last(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.index_select(0, self.cu_seqlens[1:] - 1)

    def largest(self, rows: torch.Tensor) -> torch.Tensor:
        batch, (total, width) = self.cu_seqlens.shape[0] - 1, rows.shape
        tops = torch.full((batch + 1, width), -torch.inf, device=rows.device)
        numbers = self.numbers(total)[:, None].expand(total, width)
        return tops.scatter_reduce(0, numbers, rows.float(), "amax")[:-1]

    def counts(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.cu_seqlens[1:] - self.starts())[:, None]

    def places(self, rows: torch.Tensor) -> torch.Tensor:
        total, batch = rows.shape[0], self.cu_seqlens.shape[0] - 1
        at = torch.arange(1, total + 1, device=rows.device)
        # What rows behind the last sequence have does not matter.
        numbers = self.numbers(total).clamp(max=batch - 1)
        return (at - self.cu_seqlens.index_select(0, numbers)).float()[:, None]

    def starts(self) -> torch.Tensor:
        """int32 ``[batch]``: the first row of each sequence."""
        return self.cu_seqlens[:-1]

    def numbers(self, total: int) -> torch.Tensor:
        """int64 ``[total]``: the sequence of each row by number; rows of none are of one more."""
        ends = self.cu_seqlens[1:]
        at = torch.arange(total, dtype=ends.dtype, device=ends.device)
        return torch.searchsorted(ends, at, right=True)


class Packed(Bounded):
    """Sequences end to end.

    ``cu_seqlens`` int32 ``[batch + 1]`` bounds them, and ``lengths`` says the same on the host, so that
    nothing has to wait for the device.
    """

    __slots__ = ("lengths",)

    def __init__(self, cu_seqlens: torch.Tensor, lengths: Sequence[int]) -> None:
        super().__init__(cu_seqlens)
        self.lengths = lengths

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        k, v = grouped(q, k), grouped(q, v)
        if q.is_cuda and q.dtype != torch.float32 and not causal:
            return self._attend_packed(q, k, v)
        if len(set(self.lengths)) == 1:
            return _equal_lengths(q, k, v, self.lengths[0], causal)
        return _by_length(
            q, k, v, self.lengths, lambda q, k, v, length, _: _equal_lengths(q, k, v, length, causal)
        )

    def _attend_packed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        longest, bounds = max(self.lengths), self.cu_seqlens
        packed = varlen_attn(q, k, v, bounds, bounds, longest, longest)
        return packed if isinstance(packed, torch.Tensor) else packed[0]


class Keyed(Packed):
    """Sequences end to end, of whose first rows alone all rows look at; for attention both ways.

    ``keys`` int32 ``[batch]`` is how many these are.
    """

    __slots__ = ("keys",)

    def __init__(self, cu_seqlens: torch.Tensor, lengths: Sequence[int], keys: torch.Tensor) -> None:
        super().__init__(cu_seqlens, lengths)
        self.keys = keys

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        assert not causal
        k, v = grouped(q, k), grouped(q, v)
        if len(set(self.lengths)) == 1:
            return self._attend_equal(q, k, v, self.lengths[0], range(len(self.lengths)))
        return _by_length(q, k, v, self.lengths, self._attend_equal)

    def _attend_equal(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, numbers: Sequence[int]
    ) -> torch.Tensor:
        """Attend in the sequences of these numbers, all of one length."""
        alike = len(numbers) == len(self.lengths)
        counts = self.keys if alike else torch.stack([self.keys[number] for number in numbers])
        seen = torch.arange(length, device=q.device) < counts[:, None, None, None]
        queries, keys, values = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
        return attended.transpose(1, 2).flatten(0, 1)


class Equal:
    """Sequences end to end that are all of one length."""

    __slots__ = ("length",)

    def __init__(self, length: int) -> None:
        self.length = length

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return _equal_lengths(q, grouped(q, k), grouped(q, v), self.length, causal)

    def mean(self, rows: torch.Tensor) -> torch.Tensor:
        return self._each(rows).float().mean(1)

    def first(self, rows: torch.Tensor) -> torch.Tensor:
        return self._each(rows)[:, 0]

    def last(self, rows: torch.Tensor) -> torch.Tensor:
        return self._each(rows)[:, -1]

    def largest(self, rows: torch.Tensor) -> torch.Tensor:
        return self._each(rows).float().amax(1)

    def counts(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.full((1, 1), self.length, device=rows.device)

    def places(self, rows: torch.Tensor) -> torch.Tensor:
        places = torch.arange(1.0, self.length + 1, device=rows.device)
        return places.repeat(rows.shape[0] // self.length)[:, None]

    def _each(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(-1, self.length, rows.shape[1])


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

    def mean(self, rows: torch.Tensor) -> torch.Tensor:
        # Chosen, not multiplied by zero: what padding holds must not matter even if it is no number.
        # In the flat rows: of a choice in a view of theirs torch.export cannot tell the strides.
        kept = rows.float().masked_fill(~self.mask.flatten()[:, None], 0.0)
        return self._each(kept).sum(1) / self.mask.sum(1, dtype=torch.float32)[:, None]

    def first(self, rows: torch.Tensor) -> torch.Tensor:
        return self._each(rows)[:, 0]

    def last(self, rows: torch.Tensor) -> torch.Tensor:
        sequences, tokens = self.mask.shape
        at = torch.arange(tokens, device=rows.device)
        last = torch.where(self.mask, at, 0).amax(1)
        return rows.index_select(0, torch.arange(sequences, device=rows.device) * tokens + last)

    def largest(self, rows: torch.Tensor) -> torch.Tensor:
        kept = rows.float().masked_fill(~self.mask.flatten()[:, None], -torch.inf)
        return self._each(kept).amax(1)

    def counts(self, rows: torch.Tensor) -> torch.Tensor:
        return self.mask.sum(1)[:, None]

    def places(self, rows: torch.Tensor) -> torch.Tensor:
        sequences, tokens = self.mask.shape
        return torch.arange(1.0, tokens + 1, device=rows.device).repeat(sequences)[:, None]

    def _each(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(*self.mask.shape, rows.shape[1])


class Masked(Bounded):
    """Sequences end to end whose lengths the host does not know.

    Attention is over the whole batch with a mask, which costs its square and lets a sequence that is no
    number spoil the others: good for comparisons and small batches, not for a service.
    """

    __slots__ = ()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        number = self.numbers(q.shape[0])
        mask = number[:, None] == number
        if causal:
            at = torch.arange(q.shape[0], device=q.device)
            mask = mask & (at[None, :] <= at[:, None])
        queries, keys, values = (x[None].transpose(1, 2) for x in (q, grouped(q, k), grouped(q, v)))
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=mask[None, None])
        return attended.transpose(1, 2).squeeze(0)


class Kept(Masked):
    """Sequences end to end, pooled without their first rows.

    ``skipped`` int32 ``[rows]`` says how many these are, the same at each row of a sequence. ``places``
    counts these rows, too.
    """

    __slots__ = ("_starts",)

    def __init__(self, cu_seqlens: torch.Tensor, skipped: torch.Tensor) -> None:
        super().__init__(cu_seqlens)
        starts = cu_seqlens[:-1]
        self._starts = starts + skipped.index_select(0, starts.clamp(max=skipped.shape[0] - 1))

    def starts(self) -> torch.Tensor:
        return self._starts

    def numbers(self, total: int) -> torch.Tensor:
        numbers, batch = super().numbers(total), self._starts.shape[0]
        at = torch.arange(total, dtype=self._starts.dtype, device=self._starts.device)
        kept = at >= self._starts.index_select(0, numbers.clamp(max=batch - 1))
        return torch.where(kept, numbers, batch)

    def places(self, rows: torch.Tensor) -> torch.Tensor:
        return Masked(self.cu_seqlens).places(rows)


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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], attend: _AttendEqual
) -> torch.Tensor:
    """One call for each distinct length, over views of the packed rows where a length occurs once."""
    offsets = list(accumulate(lengths, initial=0))
    numbers: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        numbers.setdefault(length, []).append(number)
    out = torch.empty_like(q)
    for length, alike in numbers.items():
        slices = [slice(offsets[number], offsets[number] + length) for number in alike]
        if len(slices) == 1:
            out[slices[0]] = attend(q[slices[0]], k[slices[0]], v[slices[0]], length, alike)
            continue
        queries, keys, values = (torch.cat([x[where] for where in slices]) for x in (q, k, v))
        attended = attend(queries, keys, values, length, alike)
        for where, rows in zip(slices, attended.view(len(slices), length, *q.shape[1:]), strict=True):
            out[where] = rows
    return out


def pool(hidden: torch.Tensor, sequences: Sequences, pooling: Pooling) -> torch.Tensor:
    """``[tokens, width]`` of any float type to float32: a row for each sequence, or with ``none`` token."""
    if pooling == "mean":
        return sequences.mean(hidden)
    if pooling == "none":
        return hidden.float()
    return _pool_otherwise(hidden, sequences, pooling)


def _pool_otherwise(hidden: torch.Tensor, sequences: Sequences, pooling: Pooling) -> torch.Tensor:
    if pooling == "first":
        return sequences.first(hidden).float()
    if pooling == "last":
        return sequences.last(hidden).float()
    if pooling == "max":
        return sequences.largest(hidden)
    if pooling == "mean_sqrt_len":
        return sequences.mean(hidden) * sequences.counts(hidden).sqrt()
    assert pooling == "weighted_mean"
    # Each row counts as often as its place says.
    weights = sequences.places(hidden)
    return sequences.mean(hidden.float() * weights) / sequences.mean(weights)
