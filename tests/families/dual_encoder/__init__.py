"""A second model family, installed as an entry point: what a newcomer's package would look like.

A dual encoder: one row for a whole image, bytes as tokens, and the mean of both. It has another tile
size, no tiling, another vocabulary and no weight files, so that whatever the service assumes about the
built-in family shows.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

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
    UInt8Array,
    VisionSpec,
    sequential,
)
from tests import distribution
from tests.families.byte_text import VOCABULARY, ByteText
from tests.families.seeded import SeededFamily

SIZE = 32
HIDDEN = 48


def weights(seed: int) -> dict[str, np.ndarray]:
    """Float32 ``tokens`` [vocabulary, hidden] and ``pixels`` [3 * size * size, hidden]."""
    random = np.random.default_rng(seed)
    return {
        "tokens": random.standard_normal((VOCABULARY, HIDDEN), np.float32),
        "pixels": random.standard_normal((3 * SIZE * SIZE, HIDDEN), np.float32) / SIZE,
    }


def misbehave(data: bytes) -> None:
    """What a broken decoder might do with a hostile file; the file's last bytes say which."""
    if data.endswith(b"CRASH"):
        ctypes.string_at(0)
    while data.endswith(b"SPIN"):
        pass
    if data.endswith(b"SLEEP"):
        time.sleep(3600)
    if data.endswith(b"SWELL"):
        bytearray(1 << 36)
    if data.endswith(b"RAISE"):
        raise ZeroDivisionError("a bug")


def install(site: Path, module: str = __name__) -> str:
    """Install a ``module`` that is a family; return the ``PYTHONPATH`` that finds it."""
    return distribution.install(site, "tessera.models", f"{module}:FAMILY")


def pixels_of(data: bytes) -> UInt8Array:
    image = Image.open(io.BytesIO(data)).convert("RGB").resize((SIZE, SIZE))
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))[None]


def reference(seed: int, text: str, images: Sequence[bytes]) -> np.ndarray:
    """The vector by plain numpy."""
    table = weights(seed)
    rows = [table["tokens"][list(text.encode())]] if text else []
    for data in images:
        rows.append((pixels_of(data).reshape(1, -1) / np.float32(255.0)) @ table["pixels"])
    mean = np.concatenate(rows).mean(axis=0)
    return mean / np.linalg.norm(mean)


@dataclass(frozen=True, slots=True)
class DualEncoder(ByteText):
    """Implements ``tessera.models.base.Model``."""

    path: Path
    seed: int

    family = "dual_encoder"
    output = Output(kind=OutputKind.VECTOR, width=HIDDEN)
    vision = VisionSpec(
        row_width=HIDDEN,
        unit_shape=(3, SIZE, SIZE),
        largest=ImagePlan(units=1, rows=1),
        independent_units=True,
    )
    features: frozenset[Feature] = frozenset()

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"dual encoder {self.seed}".encode()).hexdigest()[:32]

    def plan(self, width: int, height: int, *, param: str) -> ImagePlan:
        return ImagePlan(units=1, rows=1)

    def positions(self, tokens: Int32Array, images: Sequence[ImagePlan]) -> Int32Array:
        return sequential(len(tokens))

    def unit_positions(self, image: ImagePlan) -> Int32Array:
        return np.empty((0, image.units), np.int32)

    def preprocess(self, picture: Picture, empty: Empty = np.empty) -> Pixels:
        misbehave(picture.data)
        return Pixels(values=pixels_of(picture.data), plan=ImagePlan(units=1, rows=1))

    def weights(self) -> dict[str, np.ndarray]:
        return weights(self.seed)

    def load_vision(self, *, dtype: str, device: str) -> Any:
        import torch

        table = torch.from_numpy(self.weights()["pixels"])

        def forward(pixels, positions, cu_units, units):  # type: ignore[no-untyped-def]
            return (pixels.flatten(1).float() / 255.0) @ table

        return forward

    def load_text(self, *, dtype: str, device: str) -> Any:
        import torch

        table = torch.from_numpy(self.weights()["tokens"])

        def forward(batch: TextTensors) -> torch.Tensor:
            embedded = table[batch.input_ids].index_copy(0, batch.vision_index.long(), batch.vision_rows)
            return torch.stack([sequence.mean(0) for sequence in embedded.split(list(batch.lengths))])

        return forward

    def vision_nbytes(self, dtype: str) -> int:
        return weights(self.seed)["pixels"].nbytes

    def text_nbytes(self, dtype: str) -> int:
        return weights(self.seed)["tokens"].nbytes

    def vision_activation_nbytes(self, dtype: str, units: int) -> int:
        return units * 3 * SIZE * SIZE * 4

    def text_activation_nbytes(self, dtype: str, tokens: int) -> int:
        return tokens * HIDDEN * 8


FAMILY = SeededFamily("dual_encoder", DualEncoder)
make_checkpoint = FAMILY.make_checkpoint
