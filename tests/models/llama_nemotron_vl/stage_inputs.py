"""Batches for the stages in each layout, and what the packed module makes of the same sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tessera.models.base import TextTensors
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tests.models.llama_nemotron_vl.packing import encode


@dataclass(frozen=True)
class Batch:
    """Sequences of tokens; ``tiles`` of all images in order, and ``rows`` ``[rows, hidden]`` of them."""

    tokens: tuple[npt.NDArray[np.int32], ...]
    counts: tuple[int, ...]
    tiles: npt.NDArray[np.uint8]
    rows: torch.Tensor
    maps: tuple[npt.NDArray[np.int32], ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(map(len, self.tokens))

    def padded(self, dtype: str = "float32") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """input_ids, attention_mask, vision_rows, vision_map; the padding holds a token like any other."""
        shape = (len(self.tokens), max(self.lengths))
        ids, mask = np.full(shape, 5, np.int32), np.zeros(shape, np.int32)
        vision_map = np.full(shape, -1, np.int32)
        for number, (tokens, places) in enumerate(zip(self.tokens, self.maps, strict=True)):
            ids[number, : len(tokens)] = tokens
            mask[number, : len(tokens)] = 1
            vision_map[number, : len(tokens)] = places
        rows = self.rows.to(getattr(torch, dtype))
        return torch.from_numpy(ids), torch.from_numpy(mask), rows, torch.from_numpy(vision_map)

    def packed(self) -> tuple[torch.Tensor, ...]:
        """input_ids, positions, ends, vision_rows, vision_map."""
        return (
            torch.from_numpy(np.concatenate(self.tokens)),
            torch.from_numpy(np.concatenate([np.arange(size, dtype=np.int32) for size in self.lengths]))[
                None
            ],
            torch.from_numpy(np.cumsum(self.lengths).astype(np.int32)),
            self.rows,
            torch.from_numpy(np.concatenate(self.maps)),
        )

    def fused(self, model: LlamaNemotronVL) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """tiles, input_ids, attention_mask; rows without images bring black tiles."""
        most = max(1, *self.counts)
        tiles = np.zeros((len(self.tokens), most, *model.vision.unit_shape), np.uint8)
        start = 0
        for number, count in enumerate(self.counts):
            tiles[number, :count] = self.tiles[start : start + count]
            start += count
        ids, mask, _, _ = self.padded()
        return torch.from_numpy(tiles), ids, mask


def text_batch(model: LlamaNemotronVL, lengths: Sequence[int], seed: int = 0) -> Batch:
    """Random words, and one row of vision that nobody looks at."""
    random = np.random.default_rng(seed)
    tokens = tuple(random.integers(0, model.vocab_size // 2, size).astype(np.int32) for size in lengths)
    return Batch(
        tokens=tokens,
        counts=(0,) * len(tokens),
        tiles=np.zeros((0, *model.vision.unit_shape), np.uint8),
        rows=torch.full((1, model.output.width), 3.0),
        maps=tuple(np.full(len(one), -1, np.int32) for one in tokens),
    )


def image_batch(model: LlamaNemotronVL, counts: Sequence[int], seed: int = 0) -> Batch:
    """One sequence for each of ``counts``: words around the placeholders of so many tiles."""
    random = np.random.default_rng(seed)
    placeholder = model.config.image_token_id
    tiles = random.integers(0, 256, (sum(counts), *model.vision.unit_shape)).astype(np.uint8)
    with torch.inference_mode():
        rows = (
            encode(model.load_vision(dtype="float32", device="cpu"), torch.from_numpy(tiles))
            if len(tiles)
            else None
        )
    tokens, maps, start = [], [], 0
    for number, count in enumerate(counts):
        size = count * model.config.tokens_per_tile
        words = random.integers(0, model.vocab_size // 2, 3 + 2 * number).astype(np.int32)
        tokens.append(np.concatenate((words[:2], np.full(size, placeholder, np.int32), words[2:])))
        place = np.full(len(tokens[-1]), -1, np.int32)
        place[2 : 2 + size] = np.arange(start, start + size)
        maps.append(place)
        start += size
    return Batch(
        tokens=tuple(tokens),
        counts=tuple(counts),
        tiles=tiles,
        rows=torch.zeros(1, model.output.width) if rows is None else rows.clone(),
        maps=tuple(maps),
    )


def expected(model: LlamaNemotronVL, batch: Batch) -> torch.Tensor:
    """Pooled float32 ``[sequences, hidden]`` from the module that the torch engine runs, packed."""
    ids, positions, ends, rows, vision_map = batch.packed()
    index = torch.from_numpy(np.flatnonzero(vision_map.numpy() >= 0).astype(np.int32))
    module = model.load_text(dtype="float32", device="cpu")
    bounds = torch.nn.functional.pad(ends, (1, 0))
    with torch.inference_mode():
        return module(TextTensors(ids, positions, bounds, batch.lengths, rows[: len(index)], index))
