"""A family with what the built-in tile family lacks, small enough to compute by hand.

Images keep their shape: a unit is a patch of 4 by 4 pixels, patches see each other inside an image and know
their row and column, and four of them become one vision row. A vision row is twice as wide as the backbone:
its second half enters behind the first layer. Positions have three rows, and the last token is the vector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.imaging import Picture
from tessera.models.base import (
    Empty,
    Feature,
    ImagePlan,
    Int32Array,
    Output,
    OutputKind,
    Pixels,
    TextTensors,
    VisionSpec,
)
from tests.families.byte_text import PLACEHOLDER, VOCABULARY, ByteText
from tests.families.seeded import SeededFamily

PATCH, MERGE, MOST = 4, 2, 16
"""Pixels of a patch's side, patches of a merged side, and patches of the longest side of an image."""
INSIDE, HIDDEN = 24, 32


def weights(seed: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(seed)

    def made(*shape: int) -> np.ndarray:
        return chance.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))

    return {
        "patch": made(INSIDE, 3 * PATCH * PATCH),
        "places": made(2, MOST, INSIDE),
        "merge": made(2 * HIDDEN, MERGE * MERGE * INSIDE),
        "tokens": made(VOCABULARY, HIDDEN),
        "frequencies": made(3, HIDDEN),
        "layer": made(HIDDEN, HIDDEN),
    }


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def reference_rows(seed: int, pixels: Pixels, places: np.ndarray) -> np.ndarray:
    """One image's vision rows by plain numpy."""
    table, values = weights(seed), pixels.values
    scaled = values.astype(np.float32) / np.float32(255.0) if values.dtype == np.uint8 else values
    hidden = scaled.reshape(len(scaled), -1) @ table["patch"].T
    hidden = hidden + table["places"][0][places[0]] + table["places"][1][places[1]]
    hidden = hidden + softmax(hidden @ hidden.T) @ hidden
    return hidden.reshape(len(hidden) // MERGE**2, -1) @ table["merge"].T


def reference(seed: int, tokens: np.ndarray, positions: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """One input's vector by plain numpy, before it is scaled."""
    table = weights(seed)
    hidden, deep = table["tokens"][tokens], np.zeros((len(tokens), HIDDEN), np.float32)
    hidden[tokens == PLACEHOLDER], deep[tokens == PLACEHOLDER] = np.split(rows, 2, axis=1)
    hidden = hidden + np.sin(positions.T.astype(np.float32) @ table["frequencies"])
    hidden = np.tanh(hidden @ table["layer"].T) + deep
    scores = np.where(np.tri(len(tokens), dtype=bool), hidden @ hidden.T, -np.inf)
    return (hidden + softmax(scores) @ hidden)[-1]


@dataclass(frozen=True, slots=True)
class Grid(ByteText):
    """Implements ``tessera.models.base.Model``."""

    path: Path
    seed: int

    family = "grid"
    output = Output(kind=OutputKind.VECTOR, width=HIDDEN)
    vision = VisionSpec(
        row_width=2 * HIDDEN,
        unit_shape=(3, PATCH, PATCH),
        largest=ImagePlan(units=MOST**2, rows=(MOST // MERGE) ** 2, grid=(1, MOST, MOST)),
    )
    features = frozenset({Feature.GRAPHS})

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"grid {self.seed}".encode()).hexdigest()[:32]

    def plan(self, width: int, height: int, *, param: str) -> ImagePlan:
        high, wide = (min(MOST, -(-side // (PATCH * MERGE)) * MERGE) for side in (height, width))
        return ImagePlan(units=high * wide, rows=high * wide // MERGE**2, grid=(1, high, wide))

    def positions(self, tokens: Int32Array, images: Sequence[ImagePlan]) -> Int32Array:
        """A text token is one further on all three axes; an image spreads over the last two."""
        found, at, following, left = [], 0, iter(images), 0
        for token in tokens.tolist():
            if token != PLACEHOLDER:
                found.append((at, at, at))
                at += 1
                continue
            if not left:
                image = next(following)
                assert image.grid is not None
                high, wide = image.grid[1] // MERGE, image.grid[2] // MERGE
                left = high * wide
            row, column = divmod(high * wide - left, wide)
            found.append((at, at + row, at + column))
            left -= 1
            if not left:
                at += max(high, wide)
        return np.array(found, np.int32).T

    def unit_positions(self, image: ImagePlan) -> Int32Array:
        assert image.grid is not None
        _, high, wide = image.grid
        row, column = np.mgrid[:high, :wide].astype(np.int32)
        return np.stack([merged(row[..., None]).ravel(), merged(column[..., None]).ravel()])

    def preprocess(self, picture: Picture, empty: Empty = np.empty) -> Pixels:
        opened = picture.image
        plan = self.plan(*opened.size, param=picture.param)
        assert plan.grid is not None
        _, high, wide = plan.grid
        image = np.asarray(opened.resize((wide * PATCH, high * PATCH)))
        patches = image.reshape(high, PATCH, wide, PATCH, 3).transpose(0, 2, 4, 1, 3)
        return Pixels(values=merged(patches).reshape(-1, 3, PATCH, PATCH), plan=plan)

    def load_vision(self, *, dtype: str, device: str) -> Any:
        import torch

        table = {name: torch.from_numpy(value).to(device) for name, value in weights(self.seed).items()}

        def forward(pixels, positions, cu_units, units):  # type: ignore[no-untyped-def]
            scaled = pixels / 255.0 if pixels.dtype == torch.uint8 else pixels
            hidden = scaled.flatten(1) @ table["patch"].T
            hidden = hidden + table["places"][0][positions[0]] + table["places"][1][positions[1]]
            hidden = hidden + attended(hidden, cu_units, causal=False)
            return hidden.reshape(len(hidden) // MERGE**2, -1) @ table["merge"].T

        return forward

    def load_text(self, *, dtype: str, device: str) -> Any:
        import torch

        table = {name: torch.from_numpy(value).to(device) for name, value in weights(self.seed).items()}

        class Text:
            """Implements ``tessera.models.base.SplitTextModule``."""

            def embed(self, input_ids, vision_rows, vision_index):  # type: ignore[no-untyped-def]
                embedded = table["tokens"][input_ids]
                rows, deep = vision_rows.float().split(HIDDEN, dim=1)
                index = vision_index.long()
                return embedded.index_copy(0, index, rows), torch.zeros_like(embedded).index_copy(
                    0, index, deep
                )

            def pooled(self, embedded, positions, cu_seqlens, lengths):  # type: ignore[no-untyped-def]
                hidden, deep = embedded
                hidden += torch.sin(positions.T.float() @ table["frequencies"])
                hidden = torch.tanh(hidden @ table["layer"].T) + deep
                hidden = hidden + attended(hidden, cu_seqlens, causal=True)
                # An empty sequence has no last token; what it gives is not read.
                return hidden[(cu_seqlens[1:] - 1).clamp(min=0)]

            def __call__(self, batch: TextTensors) -> Any:
                embedded = self.embed(batch.input_ids, batch.vision_rows, batch.vision_index)
                return self.pooled(embedded, batch.positions, batch.cu_seqlens, batch.lengths)

        return Text()

    def vision_nbytes(self, dtype: str) -> int:
        return sum(weights(self.seed)[name].nbytes for name in ("patch", "places", "merge"))

    def text_nbytes(self, dtype: str) -> int:
        return sum(weights(self.seed)[name].nbytes for name in ("tokens", "frequencies", "layer"))

    def vision_activation_nbytes(self, dtype: str, units: int) -> int:
        return units * (units + 4 * INSIDE) * 4

    def text_activation_nbytes(self, dtype: str, tokens: int) -> int:
        return tokens * (tokens + 4 * HIDDEN) * 4


def merged(patches: np.ndarray) -> np.ndarray:
    """``[high, wide, ...]`` to ``[high * wide, ...]``, those that are merged behind one another."""
    high, wide, *rest = patches.shape
    blocks = patches.reshape(high // MERGE, MERGE, wide // MERGE, MERGE, *rest)
    return np.ascontiguousarray(blocks.swapaxes(1, 2)).reshape(high * wide, *rest)


def attended(hidden: Any, bounds: Any, *, causal: bool) -> Any:
    """Attention of ``[n, width]`` inside what int32 ``bounds`` bound, all of it in one matrix of scores."""
    import torch

    places = torch.arange(len(hidden), dtype=torch.int32, device=hidden.device)
    member = torch.bucketize(places, bounds[1:], right=True)
    seen = member[:, None] == member[None]
    if causal:
        seen &= places[:, None] >= places[None]
    scores = (hidden @ hidden.T).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ hidden


FAMILY = SeededFamily("grid", Grid)
make_checkpoint = FAMILY.make_checkpoint
