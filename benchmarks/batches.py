"""The engine batches that are timed: the shapes of real requests, filled with random data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tessera.engine.batch import PackedInput, TextBatch, pack
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of ``tokens`` text tokens and ``tiles`` tiles each, ``items`` of them in one text batch."""

    name: str
    tokens: int
    tiles: int
    items: int

    def total(self, model: LlamaNemotronVL) -> int:
        return self.tokens + self.tiles * model.tokens_per_tile


def workloads(*, budget: int, small: bool) -> list[Workload]:
    """What fits into ``budget`` tokens; with ``small`` the shapes of a test."""
    if small:
        shapes = [("text, 16 tokens", 16, 0, 4), ("1 tile + 4 tokens", 4, 1, 2), ("2 tiles", 4, 2, 2)]
        return [
            Workload(name=name, tokens=tokens, tiles=tiles, items=items)
            for name, tokens, tiles, items in shapes
        ]
    return [
        Workload(name="text, 1024 tokens", tokens=1024, tiles=0, items=max(1, budget // 1024)),
        Workload(name="text, 128 tokens", tokens=128, tiles=0, items=max(1, budget // 128)),
        Workload(name="text, 32 tokens", tokens=32, tiles=0, items=max(1, budget // 32)),
        Workload(name="text, 9 to 1024 tokens", tokens=-1, tiles=0, items=0),
        Workload(name="1 tile + 8 tokens", tokens=8, tiles=1, items=max(1, budget // 264)),
        Workload(name="page, 7 tiles + 4 tokens", tokens=4, tiles=7, items=max(1, budget // 1796)),
    ]


def text_batch(
    model: LlamaNemotronVL, workload: Workload, rows: torch.Tensor | None, *, seed: int, budget: int = 0
) -> TextBatch:
    """A batch of the workload; ``rows`` are the vision rows of one item, used for every item."""
    random = np.random.default_rng(seed)
    # Ordinary words only, none of the control tokens at the end of the vocabulary.
    words = model.vocab_size - 300 if model.vocab_size > 1000 else model.vocab_size // 2
    if workload.tokens < 0:
        lengths: list[int] = []
        while sum(lengths) < budget:
            lengths.append(min(int(random.integers(9, 1025)), budget - sum(lengths)))
    else:
        lengths = [workload.total(model)] * workload.items
    index = np.arange(workload.tiles * model.tokens_per_tile, dtype=np.int32)
    return pack(
        [
            PackedInput(
                tokens=random.integers(0, words, length, dtype=np.int32),
                vision=() if rows is None else (rows,),
                vision_index=index,
            )
            for length in lengths
        ]
    )


def random_tiles(model: LlamaNemotronVL, count: int, *, seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, *model.tile_shape), dtype=np.uint8)
