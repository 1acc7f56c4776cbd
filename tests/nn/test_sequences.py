from __future__ import annotations

import math

import pytest
import torch
from tessera.models.llama_nemotron_vl.attention import varlen_attention


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """One sequence and one head at a time."""
    groups = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    start = 0
    for length in lengths:
        where = slice(start, start + length)
        for head in range(q.shape[1]):
            scores = q[where, head] @ k[where, head // groups].T / math.sqrt(q.shape[-1])
            out[where, head] = scores.softmax(-1) @ v[where, head // groups]
        start += length
    return out


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(
    "lengths", [[1], [5], [3, 3, 3], [1, 7, 2], [4, 1, 4, 9, 1, 1], [300, 2, 300]], ids=str
)
def test_attends_within_each_sequence(lengths: list[int], heads: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    # views into one product, as the backbone passes them
    fused = torch.randn(total, heads[0] + 2 * heads[1], 16, generator=generator)
    q, k, v = fused.split((heads[0], heads[1], heads[1]), dim=1)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    found = varlen_attention(q, k, v, bounds, lengths)
    torch.testing.assert_close(found, reference(q, k, v, lengths), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[64], [1, 700, 3, 64, 64]], ids=str)
def test_packed_kernel_agrees(lengths: list[int]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(sum(lengths), 48, 64, generator=generator).split((32, 8, 8), dim=1)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    half = [x.to("cuda", torch.bfloat16) for x in (q, k, v)]
    found = varlen_attention(*half, bounds.cuda(), lengths).float().cpu()
    expected = reference(*(x.float().cpu() for x in half), lengths)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
