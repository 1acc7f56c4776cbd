"""Norms, MLPs, patch embeddings and mergers beside transformers' and torch's modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tessera.nn.forms.plain import Residual
from tessera.nn.layer import GatedMlp, LayerNorm, Mlp, RmsNorm
from tessera.nn.vision import Merger, PatchEmbedding
from tests.nn import peers
from tests.nn.copying import copy, noise, randomise
from tests.nn.test_attention import spec

CPU = torch.device("cpu")


@torch.no_grad()
def test_norms() -> None:
    rows = noise(5, 48) * 3 + 1
    rms = peers.Qwen2RMSNorm(48, eps=1e-5)
    layer = nn.LayerNorm(48, eps=1e-5)
    for ours, theirs in ((RmsNorm(48, eps=1e-5), rms), (LayerNorm(48, eps=1e-5), layer)):
        randomise(theirs)
        copy(ours, theirs)
        torch.testing.assert_close(ours(Residual(rows)), theirs(rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "activation"),
    [("gemma", "gelu_pytorch_tanh"), ("qwen2", "silu"), ("qwen2", "gelu"), ("qwen2", "relu")],
)
@torch.no_grad()
def test_gated_mlp(family: str, activation: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 96}
    module: Any
    if family == "gemma":
        module = peers.GemmaMLP(peers.GemmaConfig(**sizes, hidden_act=activation))
    else:
        module = peers.Qwen2MLP(peers.Qwen2Config(**sizes, hidden_act=activation))
    randomise(module)
    block = GatedMlp(spec(activation=activation))
    copy(block, module)
    check_added(block, module)


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu", "quick_gelu", "relu"])
@pytest.mark.parametrize("family", ["siglip", "qwen3_vl"])
@torch.no_grad()
def test_mlp_without_a_gate(family: str, activation: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 96, "hidden_act": activation}
    module: Any
    if family == "siglip":
        module, names = peers.SiglipMLP(peers.SiglipVisionConfig(**sizes)), ("fc1", "fc2")
    else:
        module, names = (
            peers.Qwen3VLVisionMLP(peers.Qwen3VLVisionConfig(**sizes)),
            ("linear_fc1", "linear_fc2"),
        )
    randomise(module)
    block = Mlp(spec(activation=activation, gated=False, mlp_bias=True))
    copy(block, module, {"up_proj": names[:1], "down_proj": names[1:]})
    check_added(block, module)
    block.pad()
    assert block.up_proj.weight.shape == (128, 48)
    check_added(block, module)


def check_added(block: GatedMlp | Mlp, module: nn.Module) -> None:
    rows = noise(7, 48)
    stream = Residual(noise(7, 48, seed=2))
    before = stream.rows.clone()
    block(rows, stream)
    torch.testing.assert_close(stream.rows, before + module(rows), rtol=1e-4, atol=1e-5)


MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return (pixels.float() / 255 - mean) / std


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_patches_of_tiles_are_a_convolution(bias: bool) -> None:
    convolution = nn.Conv2d(3, 48, 4, stride=4, bias=bias)
    block = PatchEmbedding(48, 4, bias=bias)
    block.projection.weight.copy_(convolution.weight.flatten(1))
    if block.projection.bias is not None and convolution.bias is not None:
        block.projection.bias.copy_(convolution.bias)
    block.place_constants(MEAN, STD, CPU)
    tiles = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 12, 12)).astype(np.uint8))
    positions = noise(18, 48)
    expected = convolution(normalised(tiles)).flatten(2).transpose(1, 2).flatten(0, 1) + positions
    found = block(tiles, positions.clone()).rows
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    # Pixels that a client normalised are taken as they are.
    torch.testing.assert_close(block(normalised(tiles), positions.clone()).rows, found)


@pytest.mark.parametrize("frames", [1, 2])
@torch.no_grad()
def test_patches_in_frames_are_those_of_qwen3_vl(frames: int) -> None:
    config = peers.Qwen3VLVisionConfig(hidden_size=48, patch_size=4, temporal_patch_size=2)
    module = peers.Qwen3VLVisionPatchEmbed(config)
    randomise(module)
    block = PatchEmbedding(48, 4, bias=True, frames=2)
    copy(block, module, {"projection": ("proj",)})
    if frames == 1:
        block.fold_frames(2)
    block.place_constants(MEAN, STD, CPU)
    patches = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 3, 4, 4)).astype(np.uint8))
    # The channels of a still image, each in two equal frames.
    twice = normalised(patches).flatten(2).repeat_interleave(2, 1).view(5, -1)
    given = patches if frames == 1 else twice
    found = block(given, torch.zeros(5, 48)).rows
    torch.testing.assert_close(found, module(twice), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_joined", [False, True])
@torch.no_grad()
def test_mergers_are_those_of_qwen3_vl(norm_joined: bool) -> None:
    config = peers.Qwen3VLVisionConfig(hidden_size=24, out_hidden_size=32, spatial_merge_size=2)
    module = peers.Qwen3VLVisionPatchMerger(config, use_postshuffle_norm=norm_joined)
    randomise(module)
    block = Merger(width=24, join=4, inner=96, out=32, eps=1e-6, norm_joined=norm_joined)
    copy(block, module, {"linear_1": ("linear_fc1",), "linear_2": ("linear_fc2",)})
    rows = noise(12, 24)
    torch.testing.assert_close(block(rows), module(rows), rtol=1e-4, atol=1e-5)
