"""Attention and pooling in every layout beside one sequence and one head at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import pad

from tessera.nn.sequences import Equal, Kept, Keyed, Masked, Packed, Padded, Sequences, pool
from tessera.nn.spec import Pooling
from tests.nn.copying import noise

BATCHES = [[1], [5], [3, 3, 3], [1, 7, 2], [4, 1, 4, 9, 1, 1], [300, 2, 300]]
LAYOUTS = ["packed", "masked", "padded"]


def cases(batches: list[list[int]]) -> list[tuple[list[int], str]]:
    """Every layout of each batch."""
    alike = [(lengths, "equal") for lengths in batches if len(set(lengths)) == 1]
    return [(lengths, layout) for lengths in batches for layout in LAYOUTS] + alike


def bounds_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], *, causal: bool
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    start = 0
    for length in lengths:
        where = slice(start, start + length)
        for head in range(q.shape[1]):
            scores = q[where, head] @ k[where, head // groups].T / math.sqrt(q.shape[-1])
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
            out[where, head] = scores.softmax(-1) @ v[where, head // groups]
        start += length
    return out


def laid_out(layout: str, lengths: list[int]) -> tuple[Sequences, torch.Tensor]:
    """The sequences, and where each packed row lies among the layout's rows."""
    total = sum(lengths)
    if layout == "packed":
        return Packed(bounds_of(lengths), lengths), torch.arange(total)
    if layout == "masked":
        return Masked(bounds_of(lengths)), torch.arange(total)
    if layout == "equal":
        return Equal(lengths[0]), torch.arange(total)
    mask = torch.arange(max(lengths) + 2)[None] < torch.tensor(lengths)[:, None]
    return Padded(mask), mask.flatten().nonzero()[:, 0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize(("lengths", "layout"), cases(BATCHES), ids=str)
def test_attends_within_each_sequence(
    lengths: list[int], heads: tuple[int, int], causal: bool, layout: str
) -> None:
    sequences, rows = laid_out(layout, lengths)
    # views into one product, as the attention block passes them
    product = noise(sum(lengths), heads[0] + 2 * heads[1], 16)
    spread = torch.full((max(int(rows.max()) + 1, len(rows)), *product.shape[1:]), 7.0)
    if isinstance(sequences, Padded):
        spread = torch.full((sequences.mask.numel(), *product.shape[1:]), 7.0)
    spread[rows] = product
    parts = [heads[0], heads[1], heads[1]]
    q, k, v = torch.split(spread, parts, dim=1)
    found = sequences.attend(q, k, v, causal=causal)[rows]
    q, k, v = torch.split(product, parts, dim=1)
    expected = reference(q, k, v, lengths, causal=causal)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("lengths", [[5], [3, 3, 3], [4, 1, 4, 9, 1, 1], [300, 2, 300]], ids=str)
def test_rows_look_at_the_first_keys_of_their_sequence(lengths: list[int], heads: tuple[int, int]) -> None:
    counts = [1 + length // 2 for length in lengths]
    product = noise(sum(lengths), heads[0] + 2 * heads[1], 16)
    q, k, v = torch.split(product, [heads[0], heads[1], heads[1]], dim=1)
    sequences = Keyed(bounds_of(lengths), lengths, torch.tensor(counts, dtype=torch.int32))
    found = sequences.attend(q, k, v, causal=False)
    start = 0
    for length, count in zip(lengths, counts, strict=True):
        # Each row as the last of a sequence that has the keys alone before it.
        for row in range(start, start + length):
            own = slice(start, start + count)
            query = q[row : row + 1].expand(count, -1, -1)
            expected = reference(query, k[own], v[own], [count], causal=False)[0]
            torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-5)
        start += length
    # What is no key may be anything.
    kept = torch.cat([torch.arange(length) < count for length, count in zip(lengths, counts, strict=True)])
    spoiled = torch.where(kept[:, None, None], k, 1e4), torch.where(kept[:, None, None], v, -1e4)
    torch.testing.assert_close(sequences.attend(q, *spoiled, causal=False), found)


REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda part: part.mean(0),
    "last": lambda part: part[-1],
    "first": lambda part: part[0],
    "max": lambda part: part.amax(0),
    "mean_sqrt_len": lambda part: part.sum(0) / len(part) ** 0.5,
    "weighted_mean": lambda part: sum(at * row for at, row in enumerate(part, 1)) / sum(range(len(part) + 1)),
}


@pytest.mark.parametrize("pooling", [*REDUCED, "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("lengths", "layout"), cases([[1, 4, 2, 9], [5, 5]]), ids=str)
def test_each_sequence_is_pooled_in_float32(
    lengths: list[int], dtype: torch.dtype, pooling: Pooling, layout: str
) -> None:
    sequences, rows = laid_out(layout, lengths)
    hidden = noise(sum(lengths), 6).to(dtype)
    spread = hidden
    if isinstance(sequences, Padded):
        spread = torch.full((sequences.mask.numel(), 6), torch.nan, dtype=dtype)
        spread[rows] = hidden
    parts = [part.float() for part in hidden.split(lengths)]
    found = pool(spread, sequences, pooling)
    assert found.dtype == torch.float32
    if pooling == "none":
        assert torch.equal(found[rows], hidden.float())
        return
    torch.testing.assert_close(found, torch.stack([REDUCED[pooling](part) for part in parts]))


def test_long_sequences_keep_their_precision() -> None:
    hidden = torch.full((8192, 2), 0.1, dtype=torch.bfloat16)
    found = pool(hidden, Packed(bounds_of([8192]), [8192]), "mean")
    torch.testing.assert_close(found, hidden[:1].float(), rtol=1e-5, atol=0)


def test_a_sequence_that_is_no_number_spoils_its_own_mean_alone() -> None:
    hidden = noise(6, 3)
    hidden[2:4] = torch.nan
    found = pool(hidden, Packed(bounds_of([2, 2, 2]), [2, 2, 2]), "mean")
    assert found.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("pooling", REDUCED)
def test_rows_behind_the_last_sequence_change_nothing(pooling: Pooling) -> None:
    hidden = noise(7, 3)
    sequences = Packed(bounds_of([4, 3]), [4, 3])
    more = pad(hidden, (0, 0, 0, 5), value=torch.nan)
    torch.testing.assert_close(pool(more, sequences, pooling), pool(hidden, sequences, pooling))


@pytest.mark.parametrize("pooling", REDUCED)
def test_empty_sequences_behind_the_last_row_change_nothing(pooling: Pooling) -> None:
    # A CUDA graph has room for more sequences than a batch that fills it.
    hidden = noise(7, 3)
    found = pool(hidden, Packed(bounds_of([4, 3, 0, 0]), [4, 3, 0, 0]), pooling)
    torch.testing.assert_close(found[:2], pool(hidden, Packed(bounds_of([4, 3]), [4, 3]), pooling))


@pytest.mark.parametrize("pooling", REDUCED)
def test_rows_that_are_left_out_change_nothing(pooling: Pooling) -> None:
    """Also beside rows of no sequence and empty sequences, for which a CUDA graph has room."""
    lengths, skipped = [4, 3, 6], [2, 0, 5]
    hidden = noise(13, 3)
    parts, found = hidden.split(lengths), []
    for more, empty in ((0, 0), (5, 0), (0, 2), (3, 2)):
        bounds = torch.cat((bounds_of(lengths), torch.full((empty,), 13))).to(torch.int32)
        left_out = torch.tensor(skipped).repeat_interleave(torch.tensor(lengths)).to(torch.int32)
        sequences = Kept(bounds, pad(left_out, (0, more), value=99))
        found.append(pool(pad(hidden, (0, 0, 0, more), value=torch.nan), sequences, pooling)[:3])
    if pooling == "weighted_mean":
        # A row counts as often as its place in the whole sequence says.
        weights = [torch.arange(1.0, length + 1)[:, None] for length in lengths]
        expected = [
            ((part * weight)[first:].sum(0) / weight[first:].sum())
            for part, weight, first in zip(parts, weights, skipped, strict=True)
        ]
    else:
        expected = [REDUCED[pooling](part[first:]) for part, first in zip(parts, skipped, strict=True)]
    for rows in found:
        torch.testing.assert_close(rows, torch.stack(expected))
