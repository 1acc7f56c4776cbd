"""A model family whose engines cost nothing, so that what is left is the service around them.

The published model's widths, 256 rows of 2,048 numbers for an image, and no arithmetic: rows and vectors
are whatever the memory holds, after a copy of the right size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.models.base import Int32Array, Prompt, Role, Truncate, UInt8Array

MODEL_TYPE = "benchmark_free"
_PLACEHOLDER = 256


@dataclass(frozen=True, slots=True)
class FreeModel:
    """Implements ``tessera.models.base.Model``; every word of a text is a token."""

    path: Path

    family = MODEL_TYPE
    fingerprint = MODEL_TYPE
    hidden = 2048
    max_tokens = 8192
    vocab_size = 257
    tokens_per_tile = 256
    max_tiles = 1
    tile_shape = (3, 16, 16)
    dimensions: frozenset[int] = frozenset()

    def tiles(self, width: int, height: int) -> int:
        return 1

    def prompt(
        self,
        text: str | Sequence[int],
        tiles: Sequence[int],
        *,
        role: Role,
        max_tokens: int,
        truncate: Truncate,
        param: str,
    ) -> Prompt:
        words = [len(word) for word in text.split()] if isinstance(text, str) else list(text)
        images = np.full(self.tokens_per_tile * len(tiles), _PLACEHOLDER, np.int32)
        return Prompt(tokens=np.concatenate([images, np.array(words, np.int32)]), image_tokens=len(images))

    def vision_index(self, tokens: Int32Array) -> Int32Array:
        return np.flatnonzero(tokens == _PLACEHOLDER).astype(np.int32)

    def preprocess(self, data: bytes, *, param: str) -> UInt8Array:
        return np.zeros((1, *self.tile_shape), np.uint8)

    def load_vision(self, *, dtype: str, device: str) -> Any:
        import torch

        rows = torch.ones(64, self.tokens_per_tile, self.hidden, dtype=getattr(torch, dtype), device=device)
        return lambda tiles: rows[: len(tiles)]

    def load_text(self, *, dtype: str, device: str) -> Any:
        import torch

        pooled = torch.ones(8192, self.hidden, device=device)
        return lambda ids, positions, bounds, lengths, rows, index: pooled[: len(lengths)]

    def vision_nbytes(self, dtype: str) -> int:
        return 1

    text_nbytes = vision_nbytes

    def vision_activation_nbytes(self, dtype: str, tiles: int) -> int:
        return 1

    text_activation_nbytes = vision_activation_nbytes


class FreeFamily:
    """Implements ``tessera.models.base.Family``."""

    name = MODEL_TYPE
    model_types = (MODEL_TYPE,)

    def open_model(self, path: Path) -> FreeModel:
        return FreeModel(path)


FAMILY = FreeFamily()
