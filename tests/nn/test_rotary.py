"""Frequencies, axes and rotation beside transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tessera.nn.rotary import Rotary, attention_factor, inverse_frequencies, rotate
from tessera.nn.spec import RopeSpec
from tests.nn import peers
from tests.nn.copying import noise

CPU = torch.device("cpu")
SCALED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192},
    ),
    "llama3, short context": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 16.0,
            "original_max_position_embeddings": 256,
        },
        {"factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 16.0, "original_max_positions": 256},
    ),
    "linear": ({"rope_type": "linear", "factor": 4.0}, {"factor": 4.0}),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        {"factor": 4.0, "original_max_positions": 4096},
    ),
    "yarn, all of it": (
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 1.2,
            "mscale_all_dim": 0.8,
            "truncate": False,
        },
        {
            "factor": 16.0,
            "original_max_positions": 16384,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 1.2,
            "mscale_all_dim": 0.8,
            "truncate": False,
        },
    ),
    "yarn, given factor": (
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 512,
            "attention_factor": 1.3,
        },
        {"factor": 2.0, "original_max_positions": 512, "attention_factor": 1.3},
    ),
}


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", SCALED)
def test_scaling_is_that_of_transformers(name: str, head_dim: int, theta: float) -> None:
    theirs, ours = SCALED[name]
    config = peers.LlamaConfig(
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        rope_parameters={**theirs, "rope_theta": theta},
        max_position_embeddings=131072,
    )
    expected, factor = peers.ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config)
    spec = RopeSpec(theta=theta, rope_type=theirs["rope_type"], **ours)
    found = inverse_frequencies(spec, head_dim)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert attention_factor(spec) == pytest.approx(factor)
    rotation = Rotary.of(spec, head_dim, CPU)(torch.tensor([[0, 3]], dtype=torch.int32))
    torch.testing.assert_close(rotation.cosines[1, 0], (3 * expected).cos() * factor)


def test_default() -> None:
    plain = inverse_frequencies(RopeSpec(theta=100.0), 4)
    torch.testing.assert_close(plain, torch.tensor([1.0, 0.1]))


def test_rotation_is_that_of_transformers() -> None:
    heads = noise(50, 3, 8)
    positions = torch.randint(0, 10_000, (1, 50), dtype=torch.int32)
    spec = RopeSpec(theta=500000.0)
    angles = (positions[0].float()[:, None] * inverse_frequencies(spec, 8)).repeat(1, 2)
    expected, _ = peers.apply_rotary_pos_emb(heads, heads, angles.cos(), angles.sin())
    rotation = Rotary.of(spec, 8, CPU)(positions)
    found = rotate(heads, rotation.cosines, rotation.sines)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_heads_of_a_small_type_are_rotated_exactly() -> None:
    heads = noise(3, 2, 8).to(torch.bfloat16)
    rotation = Rotary.of(RopeSpec(theta=500000.0), 8, CPU)(torch.tensor([[0, 1, 9999]], dtype=torch.int32))
    found = rotate(heads, rotation.cosines, rotation.sines)
    exact = rotate(heads.float(), rotation.cosines, rotation.sines)
    assert torch.equal(found, exact.to(torch.bfloat16))


@pytest.mark.parametrize(("head_dim", "sections"), [(128, (24, 20, 20)), (16, (4, 2, 2)), (20, (4, 3, 3))])
def test_interleaved_sections_are_those_of_qwen3_vl(head_dim: int, sections: tuple[int, ...]) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": list(sections)}
    config = peers.Qwen3VLTextConfig(hidden_size=64, head_dim=head_dim, rope_parameters=rope)
    positions = torch.randint(0, 3000, (3, 40), dtype=torch.int32)
    cosines, sines = peers.Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), positions[:, None])
    spec = RopeSpec(theta=5e6, sections=sections, interleaved=True)
    found = Rotary.of(spec, head_dim, CPU)(positions)
    torch.testing.assert_close(found.cosines[:, 0], cosines[0, :, : head_dim // 2])
    torch.testing.assert_close(found.sines[:, 0], sines[0, :, : head_dim // 2])


def test_angles_of_a_token_lie_side_by_side() -> None:
    """Kernels read them so, however many rows of positions there are."""
    spec = RopeSpec(theta=5e6, sections=(24, 20, 20), interleaved=True)
    for rotary, axes in ((Rotary.of(spec, 128, CPU), 3), (Rotary.axial(1e4, 64, CPU), 2)):
        found = rotary(torch.arange(axes * 7, dtype=torch.int32).view(axes, 7))
        assert found.cosines.is_contiguous() and found.sines.is_contiguous()


def test_chunked_sections_are_those_of_qwen2_5_vl() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    config = peers.Qwen2_5_VLTextConfig(hidden_size=512, num_attention_heads=4, rope_parameters=rope)
    positions = torch.randint(0, 3000, (3, 40), dtype=torch.int32)
    rotary: Any = peers.Qwen2_5_VLRotaryEmbedding
    cosines, sines = rotary(config)(torch.zeros(1), positions[:, None])
    found = Rotary.of(RopeSpec(theta=1e6, sections=(16, 24, 24)), 128, CPU)(positions)
    torch.testing.assert_close(found.cosines[:, 0], cosines.view(40, -1)[:, :64])
    torch.testing.assert_close(found.sines[:, 0], sines.view(40, -1)[:, :64])


def test_llama_4_query_scaling_is_that_of_ministral3() -> None:
    positions = torch.tensor([[0, 1, 15, 16, 17, 100, 5000]], dtype=torch.int32)
    spec = RopeSpec(theta=1e4, original_max_positions=16, query_beta=0.1)
    rotation = Rotary.of(spec, 8, CPU)(positions)
    queries = noise(7, 2, 8)
    expected = peers.get_llama_4_attn_scale(positions, 0.1, 16)[0, 0][:, None]
    torch.testing.assert_close(rotation.scaled(queries), queries * expected)
    assert (expected != 1).any()
