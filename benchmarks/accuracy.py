"""The engines against the plain float32 modules on the same inputs."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.batches import random_tiles
from tessera.engine.batch import PackedInput, pack
from tessera.engine.placement import Placement
from tessera.engine.torch.text import TorchTextEngine
from tessera.engine.torch.vision import TorchVisionEngine
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL

LENGTHS = (1, 7, 32, 33, 128, 260, 600, 1024)


def text_cosine(model: LlamaNemotronVL, engine: TorchTextEngine, placement: Placement) -> float:
    """The worst cosine of a vector, each sequence alone and all of them packed together.

    The last holds an image's rows, which are random here.
    """
    device = placement.device
    random = np.random.default_rng(0)
    words = model.vocab_size // 2
    inputs = [PackedInput(tokens=random.integers(0, words, length, dtype=np.int32)) for length in LENGTHS]
    rows = torch.from_numpy(random.standard_normal((model.tokens_per_tile, model.hidden), np.float32))
    rows = rows.to(device, placement.torch_dtype)
    index = np.arange(3, 3 + len(rows), dtype=np.int32)
    tokens = random.integers(0, words, len(rows) + 9, dtype=np.int32)
    inputs.append(PackedInput(tokens=tokens, vision=(rows,), vision_index=index))
    packed = pack(inputs)
    module = model.load_text(dtype="float32", device=device)
    with torch.inference_mode():
        expected = module(
            torch.from_numpy(packed.input_ids).to(device),
            torch.from_numpy(packed.positions).to(device),
            torch.from_numpy(packed.cu_seqlens).to(device),
            packed.lengths,
            rows.float(),
            torch.from_numpy(packed.vision_index).to(device),
        ).cpu()
    together = torch.from_numpy(engine.launch(packed).result().vectors)
    alone = torch.from_numpy(np.concatenate([engine.launch(pack([one])).result().vectors for one in inputs]))
    return min(_worst(together, expected), _worst(alone, expected))


def vision_cosine(model: LlamaNemotronVL, engine: TorchVisionEngine, placement: Placement) -> float:
    """The worst cosine of a vision row, from a replayed and from a plain batch size."""
    worst = 1.0
    module = model.load_vision(dtype="float32", device=placement.device)
    for count in (2, 9):
        tiles = random_tiles(model, count, seed=count)
        # Half of them smooth, as pages are, and half noise.
        tiles[::2] = np.linspace(0, 255, tiles.shape[-1]).astype(np.uint8)
        with torch.inference_mode():
            expected = module(torch.from_numpy(tiles).to(placement.device)).reshape(-1, model.hidden)
        out = torch.empty(expected.shape, dtype=placement.torch_dtype, device=placement.device)
        engine.launch([tiles], [out]).result()
        worst = min(worst, _worst(out.float(), expected))
    return worst


def _worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(found.double(), expected.double(), dim=-1).min())
