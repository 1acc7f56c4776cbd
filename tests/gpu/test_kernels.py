"""The Triton kernels beside plain torch in float32."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from tessera.nn.forms.plain import activation_function

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def bounds_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)


def expected_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], *, causal: bool
) -> torch.Tensor:
    """Scores written out in float32, one sequence at a time."""
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    parts = []
    for start, end in pairwise(bounds_of(lengths).tolist()):
        scores = q[:, start:end] @ k[:, start:end].mT / math.sqrt(q.shape[2])
        if causal:
            later = torch.ones(end - start, end - start, dtype=torch.bool, device=DEVICE).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        parts.append(scores.softmax(-1) @ v[:, start:end])
    return torch.cat(parts, 1).transpose(0, 1)


# lengths around the tile of 128 rows, which is 128, 64 or 32 tokens, and around the keys of one step
LENGTHS = [[1], [64], [65, 63, 1, 2], [31, 32, 33, 127, 128, 129], [700, 3, 600], [1, 1500]]
# heads, key heads, width: Llama Nemotron, Qwen3 text, its ViT, SigLIP
HEADS = [(8, 2, 64), (4, 2, 128), (3, 3, 64), (5, 1, 32), (3, 3, 72)]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_attention(
    lengths: list[int], heads: tuple[int, int, int], causal: bool, recorded: bool
) -> None:
    """``recorded``: the lengths are not known on the host, and each program looks for its sequence."""
    from tessera.nn.kernels.attention import packed_attention

    count, shared, width = heads
    total = sum(lengths)
    split = random(total, count + 2 * shared, width).split((count, shared, shared), dim=1)
    longest = total if recorded else max(lengths)
    found = packed_attention(*split, bounds_of(lengths), longest, causal=causal)
    expected = expected_attention(*split, lengths, causal=causal)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_attention_to_fewer_keys(
    lengths: list[int], heads: tuple[int, int, int], recorded: bool
) -> None:
    """Rows look at the first keys of their sequence alone; what others hold may be anything."""
    from tessera.nn.kernels.attention import packed_attention
    from tessera.nn.sequences import Keyed

    count, shared, width = heads
    total = sum(lengths)
    q, k, v = random(total, count + 2 * shared, width).split((count, shared, shared), dim=1)
    counts = [1 + length // 2 for length in lengths]
    seen = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    longest = total if recorded else max(lengths)
    found = packed_attention(q, k, v, bounds_of(lengths), longest, seen=seen)
    expected = Keyed(bounds_of(lengths), lengths, seen).attend(q.float(), k.float(), v.float(), causal=False)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=1e-2)
    packed = Keyed(bounds_of(lengths), lengths, seen).attend(q, k, v, causal=False)
    torch.testing.assert_close(packed.float(), expected, rtol=2e-2, atol=1e-2)
    kept = torch.cat([torch.arange(length) < first for length, first in zip(lengths, counts, strict=True)])
    where = kept.to(DEVICE)[:, None, None]
    k, v = torch.where(where, k, 1e4), torch.where(where, v, -1e4)
    again = packed_attention(q, k, v, bounds_of(lengths), longest, seen=seen)
    assert torch.equal(again, found)


def test_a_causal_row_does_not_see_later_keys() -> None:
    """Later keys and values may be anything, even what is no number."""
    from tessera.nn.kernels.attention import packed_attention

    lengths = [100, 300]
    q, k, v = random(400, 8, 128).split((4, 2, 2), dim=1)
    bounds = bounds_of(lengths)
    before = packed_attention(q, k, v, bounds, 300, causal=True)
    k[60:100], v[60:100], k[350:], v[350:] = 1e4, -1e4, -1e4, 1e4
    after = packed_attention(q, k, v, bounds, 300, causal=True)
    assert torch.equal(before[:60], after[:60]) and torch.equal(before[100:350], after[100:350])
    assert not torch.equal(before[60:100], after[60:100])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(16, 16, 64), (3, 3, 72), (4, 2, 128)], ids=str)
@pytest.mark.parametrize("lengths", [[1], [2100], [65, 63, 1, 2], [700, 3, 600, 1284]], ids=str)
def test_flash_attention(lengths: list[int], heads: tuple[int, int, int], causal: bool) -> None:
    from tessera.nn.kernels import flash

    count, shared, width = heads
    split = random(sum(lengths), count + 2 * shared, width).split((count, shared, shared), dim=1)
    if not flash.serves(split[0]):
        pytest.skip("needs flash-attn-4 and a Hopper card")
    found = flash.flash_attention(*split, bounds_of(lengths), causal=causal)
    expected = expected_attention(*split, lengths, causal=causal)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=1e-2)


def turned(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = heads.float().chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


@pytest.mark.parametrize(("counts", "width"), [((16, 8), 128), ((32, 8), 64), ((3, 3), 72)], ids=str)
def test_norm_and_rotation_of_heads(counts: tuple[int, int], width: int) -> None:
    from tessera.nn.kernels.rotary import norm_and_rotate_in_place, rotate_in_place

    total, (q_heads, kv_heads) = 37, counts
    heads = random(total, q_heads + 2 * kv_heads, width)
    # one head far smaller than the others: eps counts
    heads[:, 1] *= 1e-3
    q_weight, k_weight = random(width, seed=1), random(width, seed=2)
    angles = random(total, 1, width // 2, seed=3, dtype=torch.float32)
    cosines, sines = angles.cos(), angles.sin()
    split = heads.float().split((q_heads, kv_heads, kv_heads), dim=1)
    normed = [
        x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
        for x, weight in zip(split[:2], (q_weight, k_weight), strict=True)
    ]
    expected = torch.cat([*(turned(x, cosines, sines) for x in normed), split[2]], 1)
    plain = torch.cat([turned(torch.cat(split[:2], 1), cosines, sines), split[2]], 1)
    rotated = heads.clone()
    rotate_in_place(rotated, q_heads + kv_heads, cosines, sines)
    torch.testing.assert_close(rotated.float(), plain, rtol=1e-2, atol=1e-2)
    norm_and_rotate_in_place(heads, q_heads, kv_heads, q_weight, k_weight, 1e-6, cosines, sines)
    torch.testing.assert_close(heads.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("width", [1024, 1152, 48])
def test_weighted_rows_of_a_table(width: int) -> None:
    from tessera.nn.kernels.rows import add_weighted_rows

    total = 50
    onto, table = random(total, width), random(23, width, seed=1)
    index = torch.randint(0, 23, (4, total), generator=torch.Generator().manual_seed(2))
    index = index.to(DEVICE, torch.int32)
    weights = random(4, total, seed=3, dtype=torch.float32)
    expected = onto.float() + torch.einsum("ti,tiw->iw", weights, table.float()[index.long()])
    add_weighted_rows(onto, table, index, weights)
    torch.testing.assert_close(onto.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("features", [768, 48])
def test_normalised_patches(features: int) -> None:
    from tessera.nn.kernels.patches import normalised_rows

    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (33, features), generator=generator, dtype=torch.uint8).to(DEVICE)
    mean, std = (torch.rand(features, generator=generator).to(DEVICE) + 0.2 for _ in range(2))
    found = normalised_rows(pixels, mean, std, dtype=DTYPE)
    torch.testing.assert_close(found.float(), (pixels.float() / 255 - mean) / std, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
def test_an_activation_behind_a_product(activation: str) -> None:
    """Exact to bfloat16's rounding, in the tails as well, where the tanh form of GELU differs by more."""
    from tessera.nn.kernels import gemm

    rows, weight = torch.zeros(4096, 64, device=DEVICE), torch.zeros(256, 64, device=DEVICE)
    rows[:, 0], weight[:, 0] = torch.linspace(-4, 4, 4096, device=DEVICE), 1.0
    rows, weight = rows.to(torch.bfloat16), weight.to(torch.bfloat16)
    if not gemm.serves(weight):
        pytest.skip("needs quack-kernels and a Hopper card")
    bias = torch.linspace(-0.1, 0.1, 256, device=DEVICE)
    found = gemm.activated(rows, weight, bias, activation).float()
    given = rows[:, :1].double() + bias.double()
    expected = activation_function(activation)(given).float()
    torch.testing.assert_close(found, expected, rtol=6e-3, atol=1e-6)
    other = activation_function("gelu_new" if activation == "gelu" else "gelu")(given).float()
    assert not torch.allclose(found, other, rtol=6e-3, atol=1e-6)
