from __future__ import annotations

import pytest
import torch
from tessera.models.llama_nemotron_vl.rope import inverse_frequencies, rotate, rotation
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tessera.models.llama_nemotron_vl.config import RopeConfig


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    ("theta", "factor", "low", "high", "context"),
    [(500000.0, 32.0, 1.0, 4.0, 8192), (10000.0, 8.0, 1.0, 4.0, 256), (500000.0, 8.0, 2.0, 16.0, 1024)],
)
def test_llama3_scaling_is_that_of_transformers(
    head_dim: int, theta: float, factor: float, low: float, high: float, context: int
) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
    config = LlamaConfig(
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        rope_parameters=rope,
        max_position_embeddings=131072,
    )
    expected, scale = ROPE_INIT_FUNCTIONS["llama3"](config)
    found = inverse_frequencies(
        RopeConfig(
            rope_type="llama3",
            theta=theta,
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=context,
        ),
        head_dim,
    )
    assert scale == 1.0
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_linear_and_default() -> None:
    plain = inverse_frequencies(RopeConfig(rope_type="default", theta=100.0), 4)
    torch.testing.assert_close(plain, torch.tensor([1.0, 0.1]))
    scaled = inverse_frequencies(RopeConfig(rope_type="linear", theta=100.0, factor=4.0), 4)
    torch.testing.assert_close(scaled, plain / 4)


def test_rotation_is_that_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(50, 3, 8, generator=generator)
    positions = torch.randint(0, 10_000, (50,), generator=generator, dtype=torch.int32)
    frequencies = inverse_frequencies(RopeConfig(rope_type="default", theta=500000.0), 8)
    angles = (positions.float()[:, None] * frequencies).repeat(1, 2)
    expected, _ = apply_rotary_pos_emb(heads, heads, angles.cos(), angles.sin())
    found = rotate(heads, *rotation(positions, frequencies))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_heads_of_a_small_type_are_turned_exactly() -> None:
    heads = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    positions = torch.tensor([0, 1, 9999], dtype=torch.int32)
    frequencies = inverse_frequencies(RopeConfig(rope_type="default", theta=500000.0), 8)
    turned = rotate(heads, *rotation(positions, frequencies))
    assert torch.equal(turned, rotate(heads.float(), *rotation(positions, frequencies)).to(torch.bfloat16))
