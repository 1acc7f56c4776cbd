"""A model's modules on any device, held to the float32 vectors that are carried for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tessera.models import open_model
from tessera.models.base import Model, OutputKind
from tests.models.running import cosines, errors, found_by
from tests.references.carry import Carried

BARS = {"bfloat16": 0.998, "float32": 0.9999}
"""In bfloat16 one form of GELU for the other is within the noise; in float32 it is not."""
SCORE_BARS = {"bfloat16": 0.045, "float32": 0.001}
"""Of logits: differences, as shares of how far the logits deviate; on an H200 0.0246 at most in bfloat16."""

PICTURE_BAR = 0.15
"""Of qwen3_vl_rerank's pairs with images in bfloat16, 0.106 at most on an H100.

Rounded rows of images add to what the text tower rounds: on a CPU they alone make 0.036, that tower alone
with exact rows 0.058, and 0.042 of texts. transformers' own modules in bfloat16 are off by 0.152 there.
"""


def score_bars(carried: Carried, bar: float) -> np.ndarray:
    """The bar of each pair, a wider one for images in bfloat16."""
    wide = carried.name == "qwen3_vl_rerank" and bar > SCORE_BARS["float32"]
    return np.array([max(bar, PICTURE_BAR) if wide and given.images else bar for given in carried.inputs])


def assert_carried(carried: Carried, folder: Path, *, dtype: str, device: str) -> tuple[Model, np.ndarray]:
    """Run the checkpoint, written below ``folder``, over the inputs; returns the model and what it gave."""
    name, model = carried.name, open_model(carried.checkpoint(folder))
    found = found_by(model, carried.inputs, dtype=dtype, device=device)
    if model.output.kind is OutputKind.SCORE:
        each = errors(found, carried.vectors())
        bars = score_bars(carried, SCORE_BARS[dtype])
        print(f"{name:32}{dtype:10}worst difference {each.max():.5f} of a deviation, each {each.round(4)}")
        assert (each <= bars).all()
        return model, found
    cosine = cosines(found, carried.vectors())
    print(
        f"{name:32}{dtype:10}worst cosine {cosine.min():.7f}  each {' '.join(f'{one:.5f}' for one in cosine)}"
    )
    assert cosine.min() >= BARS[dtype]
    return model, found
