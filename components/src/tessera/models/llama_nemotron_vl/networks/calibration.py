"""The steps of float8 operands, from what goes into each product while real modules run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

from tessera.models.graph import Samples
from tessera.models.llama_nemotron_vl.text import TextTower
from tessera.models.llama_nemotron_vl.vision import VisionTower

_FLOAT8_MAX = 448.0


def vision_scales(tower: VisionTower, samples: Samples) -> Mapping[nn.Module, float]:
    """For the products inside all layers but the first and the last; one tile at a time."""
    layers = tower.vision.layers[1:-1]
    products = [
        product
        for layer in layers
        for product in (layer.self_attn.qkv_proj, layer.self_attn.out_proj, layer.mlp.fc1, layer.mlp.fc2)
    ]

    def run() -> None:
        for tile in samples.tiles:
            tower(torch.from_numpy(tile[None]))

    return _largest_inputs(products, run)


def text_scales(tower: TextTower, samples: Samples) -> Mapping[nn.Module, float]:
    """For the products inside all layers but the first and the last; one sequence at a time."""
    products = [
        product
        for layer in tower.stack[1:-1]
        for product in (
            layer.self_attn.qkv_proj,
            layer.self_attn.o_proj,
            layer.mlp.gate_up_proj,
            layer.mlp.down_proj,
        )
    ]
    nothing = torch.empty(0, tower.embed_tokens.embedding_dim), torch.empty(0, dtype=torch.int32)

    def run() -> None:
        for tokens in samples.tokens:
            positions = torch.arange(len(tokens), dtype=torch.int32)
            bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
            tower(torch.from_numpy(tokens), positions, bounds, (len(tokens),), *nothing)

    return _largest_inputs(products, run)


def _largest_inputs(products: Sequence[nn.Module], run: Callable[[], None]) -> dict[nn.Module, float]:
    largest = dict.fromkeys(products, 0.0)

    def see(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        largest[module] = max(largest[module], float(inputs[0].abs().max()))

    with ExitStack() as hooks, torch.inference_mode():
        for product in products:
            hooks.callback(product.register_forward_pre_hook(see).remove)
        run()
    smallest = float(np.finfo(np.float32).tiny)
    return {module: max(value, smallest) / _FLOAT8_MAX for module, value in largest.items()}
