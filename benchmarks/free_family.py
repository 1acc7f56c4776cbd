"""A model family whose engines cost nothing, so that what is left is the service around them.

The published model's widths, 256 rows of 2,048 numbers for an image, and no arithmetic: rows and vectors
are whatever the memory holds, after a copy of the right size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.image_plan import ImagePlan
from tessera.models.base import (
    Content,
    Feature,
    Int32Array,
    Output,
    OutputKind,
    Piece,
    Pixels,
    Prompt,
    Truncate,
    VisionSpec,
    sequential,
)

MODEL_TYPE = "benchmark_free"
_PLACEHOLDER = 256
_WIDTH = 2048
_IMAGE = ImagePlan(units=1, rows=256)


@dataclass(frozen=True, slots=True)
class FreeModel:
    """Implements ``tessera.models.base.Model``; every word of a text is a token."""

    path: Path

    family = MODEL_TYPE
    fingerprint = MODEL_TYPE
    output = Output(kind=OutputKind.VECTOR, width=_WIDTH)
    vision = VisionSpec(row_width=_WIDTH, unit_shape=(3, 16, 16), largest=_IMAGE, independent_units=True)
    max_tokens = 8192
    vocab_size = 257
    dimensions: frozenset[int] = frozenset()
    features: frozenset[Feature] = frozenset()

    def plan(self, width: int, height: int, *, param: str) -> ImagePlan:
        return _IMAGE

    def prompt(self, content: Content, *, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        tokens: list[int] = []
        for part in content.parts:
            if isinstance(part, ImagePlan):
                tokens += [_PLACEHOLDER] * part.rows
            else:
                tokens += [len(word) for word in part.split()] if isinstance(part, str) else part
        image_tokens = sum(image.rows for image in content.images)
        return Prompt(tokens=np.array(tokens, np.int32), image_tokens=image_tokens)

    def pieces(self, text: str, *, role: object, instruction: str | None = None, param: str) -> list[Piece]:
        return [Piece(token=len(word), text=word) for word in text.split()]

    def token_text(self, token: int) -> str:
        return str(token)

    def vision_index(self, tokens: Int32Array) -> Int32Array:
        return np.flatnonzero(tokens == _PLACEHOLDER).astype(np.int32)

    def positions(self, tokens: Int32Array, images: Sequence[ImagePlan]) -> Int32Array:
        return sequential(len(tokens))

    def unit_positions(self, image: ImagePlan) -> Int32Array:
        return np.empty((0, image.units), np.int32)

    def preprocess(self, data: bytes, *, param: str) -> Pixels:
        return Pixels(values=np.zeros((1, *self.vision.unit_shape), np.uint8), plan=_IMAGE)

    def load_vision(self, *, dtype: str, device: str) -> Any:
        import torch

        rows = torch.ones(64 * _IMAGE.rows, _WIDTH, dtype=getattr(torch, dtype), device=device)
        return lambda pixels, positions, bounds, units: rows[: len(pixels) * _IMAGE.rows]

    def load_text(self, *, dtype: str, device: str) -> Any:
        import torch

        pooled = torch.ones(8192, _WIDTH, device=device)
        return lambda ids, positions, bounds, lengths, rows, index: pooled[: len(lengths)]

    def vision_nbytes(self, dtype: str) -> int:
        return 1

    text_nbytes = vision_nbytes

    def vision_activation_nbytes(self, dtype: str, units: int) -> int:
        return 1

    text_activation_nbytes = vision_activation_nbytes


class FreeFamily:
    """Implements ``tessera.models.base.Family``."""

    name = MODEL_TYPE
    model_types = (MODEL_TYPE,)

    def open_model(self, path: Path, options: Mapping[str, object]) -> FreeModel:
        return FreeModel(path)


FAMILY = FreeFamily()
