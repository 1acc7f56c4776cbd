"""The attention block beside transformers' attention modules, over packed sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tessera.nn.forms.plain import Residual
from tessera.nn.layer import Attention
from tessera.nn.rotary import Rotary, inverse_frequencies
from tessera.nn.sequences import Equal, Packed
from tessera.nn.spec import LayerSpec, RopeSpec
from tests.nn import peers
from tests.nn.copying import copy, noise, randomise

CPU = torch.device("cpu")
LENGTHS = [1, 7, 20, 7]
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
POSITIONS = torch.cat([torch.arange(length, dtype=torch.int32) for length in LENGTHS])[None]


def spec(**changes: Any) -> LayerSpec:
    values: dict[str, Any] = {
        "hidden": 48,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "intermediate": 96,
        "activation": "silu",
        "norm": "rms",
        "eps": 1e-6,
        "gated": True,
    }
    return LayerSpec(**(values | changes))


LLAMA4 = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
# The prefix of its classes' names, and its configuration; what the block's spec and RoPE have of their own.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], RopeSpec]] = {
    "q/k norm, Qwen3": (
        "Qwen3",
        {"rope_parameters": PLAIN},
        {"qk_norm": True, "causal": True},
        RopeSpec(theta=1e4),
    ),
    "biases of q, k and v, Qwen2": (
        "Qwen2",
        {"rope_parameters": PLAIN},
        {"qkv_bias": True, "causal": True},
        RopeSpec(theta=1e4),
    ),
    "all biases, Llama": (
        "Llama",
        {"rope_parameters": PLAIN, "attention_bias": True},
        {"qkv_bias": True, "out_bias": True},
        RopeSpec(theta=1e4),
    ),
    "scaled queries, Ministral3": (
        "Ministral3",
        {"rope_parameters": LLAMA4},
        {"causal": True},
        RopeSpec(
            theta=1e4,
            rope_type="yarn",
            factor=4.0,
            original_max_positions=8,
            mscale=1.0,
            mscale_all_dim=1.0,
            query_beta=0.1,
        ),
    ),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_attention_is_that_of_transformers(kind: str, causal: bool) -> None:
    prefix, configured, own, rope = KINDS[kind]
    config = getattr(peers, f"{prefix}Config")(**configured)
    config.update({"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16})
    config._attn_implementation = "eager"
    module = getattr(peers, f"{prefix}Attention")(config, 0).eval()
    randomise(module)
    block = Attention(spec(**(own | {"causal": causal})))
    copy(block, module)
    rows = noise(sum(LENGTHS), 48)
    stream = Residual(torch.zeros_like(rows))
    block(rows, stream, Packed(BOUNDS, LENGTHS), Rotary.of(rope, 16, CPU)(POSITIONS))
    rotary = getattr(peers, f"{prefix}RotaryEmbedding")(config)
    for part, found in zip(rows.split(LENGTHS), stream.rows.split(LENGTHS), strict=True):
        positions = torch.arange(len(part))[None]
        mask = torch.zeros(1, 1, len(part), len(part))
        if causal:
            mask += torch.full_like(mask, -torch.inf).triu(1)
        given: dict[str, Any] = {"position_ids": positions} if prefix == "Ministral3" else {}
        expected, *_ = module(
            hidden_states=part[None],
            position_embeddings=rotary(part[None], positions),
            attention_mask=mask,
            past_key_values=None,
            **given,
        )
        torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head_dim", [16, 72])
@torch.no_grad()
def test_rotation_in_a_plane_is_that_of_qwen3_vl(head_dim: int) -> None:
    hidden = 2 * head_dim
    config = peers.Qwen3VLVisionConfig(hidden_size=hidden, num_heads=2, depth=1)
    config._attn_implementation = "eager"
    module = peers.Qwen3VLVisionAttention(config).eval()
    randomise(module)
    block = Attention(
        spec(hidden=hidden, heads=2, kv_heads=2, head_dim=head_dim, qkv_bias=True, out_bias=True)
    )
    copy(block, module, {"qkv_proj": ("qkv",), "o_proj": ("proj",)})
    grids = [(2, 4), (6, 2), (1, 1)]
    places = torch.cat([torch.cartesian_prod(torch.arange(h), torch.arange(w)).view(-1, 2) for h, w in grids])
    lengths = [h * w for h, w in grids]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    rows = noise(sum(lengths), hidden)
    stream = Residual(torch.zeros_like(rows))
    block(rows, stream, Packed(bounds, lengths), Rotary.axial(1e4, head_dim, CPU)(places.t().int()))
    # As Qwen3VLVisionModel makes them: rows, then columns, then both once more.
    frequencies = inverse_frequencies(RopeSpec(theta=1e4), head_dim // 2)
    angles = (places[..., None] * frequencies).flatten(1).repeat(1, 2)
    expected = module(rows, cu_seqlens=bounds, position_embeddings=(angles.cos(), angles.sin()))
    torch.testing.assert_close(stream.rows, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_attention_without_rotation_is_that_of_siglip() -> None:
    config = peers.SiglipVisionConfig(hidden_size=48, num_attention_heads=3)
    config._attn_implementation = "eager"
    module = peers.SiglipAttention(config).eval()
    randomise(module)
    block = Attention(spec(heads=3, kv_heads=3, qkv_bias=True, out_bias=True))
    copy(block, module, {"o_proj": ("out_proj",)})
    tiles = noise(2, 9, 48)
    stream = Residual(torch.ones(18, 48))
    block(tiles.flatten(0, 1), stream, Equal(9), None)
    expected = module(tiles)[0].flatten(0, 1)
    torch.testing.assert_close(stream.rows - 1, expected, rtol=1e-4, atol=1e-5)
