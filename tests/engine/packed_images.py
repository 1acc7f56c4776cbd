"""Batches of images to run vision engines on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tessera.engine.base import vision_of
from tessera.engine.batch import VisionBatch, pack_images
from tessera.models.base import ImagePlan, Model, Pixels


def packed(model: Model, images: Sequence[Pixels]) -> VisionBatch:
    return pack_images(images, [model.unit_positions(image.plan) for image in images])


def noise(model: Model, plan: ImagePlan, seed: int = 0) -> Pixels:
    """An image of random bytes."""
    chance = np.random.default_rng([seed, plan.units])
    values = chance.integers(0, 256, (plan.units, *vision_of(model).unit_shape), dtype=np.uint8)
    return Pixels(values=values, plan=plan)


def of_units(model: Model, counts: Sequence[int]) -> VisionBatch:
    """Images of so many independent units each."""
    rows = vision_of(model).rows
    plans = [ImagePlan(units=count, rows=rows(count)) for count in counts]
    return packed(model, [noise(model, plan, seed) for seed, plan in enumerate(plans)])


def rows_for(
    model: Model, batch: VisionBatch, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[torch.Tensor]:
    """Where an engine may write the rows of each image, full of -1."""
    width = vision_of(model).row_width
    return [torch.full((plan.rows, width), -1.0, dtype=dtype, device=device) for plan in batch.plans]


def computed(model: Model, batch: VisionBatch) -> torch.Tensor:
    """The rows of all images, ``[rows, row_width]``, by the family's module in float32 on the CPU."""
    with torch.inference_mode():
        return model.load_vision(dtype="float32", device="cpu")(
            torch.from_numpy(np.concatenate(batch.pixels)),
            torch.from_numpy(batch.positions),
            torch.from_numpy(batch.cu_units),
            batch.units,
        )
