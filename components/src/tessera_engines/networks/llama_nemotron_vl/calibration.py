"""The steps of float8 operands, from what goes into each product while real modules run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

from tessera.models.llama_nemotron_vl.vision import LlamaNemotronVision
from tessera.nn.fp8 import LARGEST
from tessera.nn.layer import Stack
from tessera.nn.tensors import TextTensors
from tessera.nn.text import TextTower
from tessera_engines.networks.graph import Samples
from tessera_engines.quantize.tower import Observing, running


def vision_scales(tower: LlamaNemotronVision, samples: Samples) -> Mapping[nn.Module, float]:
    """For the products inside all layers but the first and the last; one tile at a time."""

    def run() -> None:
        for tile in samples.tiles:
            tower.rows(torch.from_numpy(tile[None]))

    return _scales(tower.vision.layers, run)


def text_scales(tower: TextTower, samples: Samples) -> Mapping[nn.Module, float]:
    """For the products inside all layers but the first and the last; one sequence at a time."""
    nothing = torch.empty(0, tower.spec.row_width), torch.empty(0, dtype=torch.int32)

    def run() -> None:
        for tokens in samples.tokens:
            positions = torch.arange(len(tokens), dtype=torch.int32)[None]
            bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
            tower(TextTensors(torch.from_numpy(tokens), positions, bounds, (len(tokens),), *nothing))

    return _scales(tower.layers, run)


def _scales(stack: Stack, run: Callable[[], None]) -> dict[nn.Module, float]:
    observing = Observing()
    with running(stack, dict.fromkeys(range(1, len(stack) - 1), observing)), torch.inference_mode():
        run()
    smallest = float(np.finfo(np.float32).tiny)
    return {module: max(seen.largest, smallest) / LARGEST for module, seen in observing.seen.items()}
