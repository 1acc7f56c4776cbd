"""Rotary position embedding in the rotate-half layout, with Llama 3's frequency scaling."""

from __future__ import annotations

import math

import torch

from tessera.models.llama_nemotron_vl.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position, float32 ``[head_dim / 2]`` on the CPU.

    ``llama3`` leaves wavelengths alone that fit often into the original context, divides the frequency
    of those that hardly fit into it by ``factor``, and blends linearly in between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.rope_type == "default":
        return frequencies
    if config.rope_type == "linear":
        return frequencies / config.factor
    context = config.original_max_positions
    wavelengths = 2 * math.pi / frequencies
    share = (context / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blended = (1 - share) * frequencies / config.factor + share * frequencies
    scaled = torch.where(wavelengths > context / config.low_freq_factor, frequencies / config.factor, blended)
    return torch.where(wavelengths < context / config.high_freq_factor, frequencies, scaled)


def rotation(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[total, 1, head_dim / 2]`` in float32."""
    angles = (positions.to(torch.float32)[:, None] * frequencies)[:, None, :]
    return angles.cos(), angles.sin()


def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn ``[total, heads, head_dim]``; the first half of each head pairs with its second half.

    In float32 whatever the heads' type: rounding the angles to bfloat16, as the usual implementations do,
    costs more than all other rounding of a layer together.
    """
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(heads.dtype)
