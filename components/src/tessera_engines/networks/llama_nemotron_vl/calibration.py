"""The steps of float8 operands, from what goes into each product while real modules run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import nn

from tessera.models.llama_nemotron_vl.vision import VisionTower
from tessera.nn.forms.plain import PLAIN, Form, Rows, tensor
from tessera.nn.layer import Linear, Stack, use
from tessera.nn.text import TextTower
from tessera_engines.networks.graph import Samples

_FLOAT8_MAX = 448.0


def vision_scales(tower: VisionTower, samples: Samples) -> Mapping[nn.Module, float]:
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
            tower(torch.from_numpy(tokens), positions, bounds, (len(tokens),), *nothing)

    return _scales(tower.layers, run)


class _Watched(Form):
    """Plain torch that remembers the largest number that went into each product."""

    def __init__(self, products: Iterable[Linear]) -> None:
        self.largest: dict[nn.Module, float] = dict.fromkeys(products, 0.0)

    def product(self, linear: Linear, rows: Rows) -> torch.Tensor:
        self.largest[linear] = max(self.largest[linear], float(tensor(rows).abs().max()))
        return super().product(linear, rows)


def _scales(stack: Stack, run: Callable[[], None]) -> dict[nn.Module, float]:
    inner = stack.layers[1:-1]
    watched = _Watched(one for layer in inner for one in layer.modules() if isinstance(one, Linear))
    for layer in inner:
        use(layer, watched)
    with torch.inference_mode():
        run()
    for layer in inner:
        use(layer, PLAIN)
    smallest = float(np.finfo(np.float32).tiny)
    return {module: max(value, smallest) / _FLOAT8_MAX for module, value in watched.largest.items()}
