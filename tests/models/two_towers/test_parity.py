"""Vectors of both towers against transformers' own, and the pixels that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.imaging import Picture
from tessera.models import open_model
from tessera.models.base import Model, OutputKind
from tessera.nn.layer import Stack
from tessera_tools.random_checkpoint.towers import CLIP_TINY, SIGLIP2_TINY, SIGLIP_TINY, TowersSpec
from tests.models.conftest import WriteCheckpoint
from tests.models.running import batch_of, cosines, vectors
from tests.models.two_towers.cases import CASES, IMAGES
from tests.references.families import reference_of
from tests.references.towers import TowersReference

pytestmark = pytest.mark.parity

BARS = {"float32": 0.99999, "bfloat16": 0.998}
CONFIGURATIONS: dict[str, TowersSpec] = {
    "clip": CLIP_TINY,
    "clip, older end token, gelu, shards": replace(
        CLIP_TINY, end=2, activation="gelu", width=80, patch_size=32, image_size=96, shards=2
    ),
    "siglip": SIGLIP_TINY,
    "siglip 2, patches that leave pixels over": replace(
        SIGLIP_TINY, bytes_vocabulary=True, image_size=100, patch_size=14, resample=2
    ),
    "siglip2": SIGLIP2_TINY,
    "siglip2, many patches": replace(SIGLIP2_TINY, image_size=256, most_patches=100),
}

Record = Callable[[str, Any], None]


def reference(path: Path) -> TowersReference:
    found = reference_of(path)
    assert isinstance(found, TowersReference)
    return found


def computed(model: Model, dtype: str = "float32") -> np.ndarray:
    vision, text = (load(dtype=dtype, device="cpu") for load in (model.load_vision, model.load_text))
    return vectors(model, text, batch_of(model, vision, CASES))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_vectors(name: str, written: WriteCheckpoint, record_property: Record) -> None:
    path = written(CONFIGURATIONS[name])
    model, wanted = open_model(path), reference(path)
    assert (model.output.kind, model.output.width) == (OutputKind.VECTOR, CONFIGURATIONS[name].width)
    expected = np.stack([wanted.answer(given) for given in CASES])
    for dtype, bar in BARS.items():
        cosine = cosines(computed(model, dtype), expected).min()
        line = f"{name:40}{dtype:10}worst cosine {cosine:.7f} of {len(CASES)}"
        record_property("parity of two towers with transformers in float32", line)
        assert cosine >= bar, line
    # Neither texts nor images are alike: a vector of nothing would pass otherwise.
    assert (np.triu(expected @ expected.T, 1) < 0.9999).all()


def layers_of(tower: Any, kept: list[torch.Tensor]) -> None:
    """Keep the rows behind each of our layers."""
    (stack,) = (module for module in tower.modules() if isinstance(module, Stack))
    for number, layer in enumerate(stack.layers):
        layer.register_forward_hook(
            lambda _, given, __, number=number: kept.append(stack.output(given[0], number).clone())
        )


def reference_layers(tower: Any, kept: list[torch.Tensor]) -> None:
    for layer in tower.encoder.layers:
        layer.register_forward_hook(
            lambda _, __, output: kept.append((output[0] if isinstance(output, tuple) else output)[0])
        )


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_layer(name: str, written: WriteCheckpoint, record_property: Record) -> None:
    """The rows behind each layer of both towers, of a batch of all texts or all images."""
    path = written(CONFIGURATIONS[name])
    model, wanted = open_model(path), reference(path)
    vision, text = (load(dtype="float32", device="cpu") for load in (model.load_vision, model.load_text))
    towers = {"text": (text, wanted.model.text_model), "vision": (vision, wanted.model.vision_model)}
    for tower, (ours, theirs) in towers.items():
        found: list[torch.Tensor] = []
        expected: list[torch.Tensor] = []
        layers_of(ours, found)
        reference_layers(theirs, expected)
        cases = [case for case in CASES if bool(case.images) == (tower == "vision")]
        vectors(model, text, batch_of(model, vision, cases))
        for case in cases:
            wanted.answer(case)
        count = len(found)
        by_layer = [torch.cat(expected[number::count]) for number in range(count)]
        seen = torch.ones(len(found[0]), dtype=torch.bool)
        if (name.partition(",")[0], tower) == ("siglip2", "vision"):
            masks = [wanted.pixels(case.images[0])["pixel_attention_mask"][0] for case in cases]
            seen = torch.cat(masks).bool()
        worst = min(
            cosines(mine[seen].numpy(), theirs[seen].numpy()).min()
            for mine, theirs in zip(found, by_layer, strict=True)
        )
        line = f"{name:40}{f'{count} layers of {tower}':20}worst cosine {worst:.7f} of {int(seen.sum())} rows"
        record_property("parity of two towers with transformers in float32", line)
        assert worst >= BARS["float32"], line


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("image", IMAGES)
def test_pixels(name: str, image: str, written: WriteCheckpoint) -> None:
    path = written(CONFIGURATIONS[name])
    model, wanted = open_model(path), reference(path).pixels(IMAGES[image])
    found = model.preprocess(Picture(IMAGES[image], param="x")).values[0]
    values = wanted["pixel_values"][0].numpy()
    if "spatial_shapes" in wanted:
        rows, columns = wanted["spatial_shapes"][0].tolist()
        assert model.preprocess(Picture(IMAGES[image], param="x")).plan.grid == (1, rows, columns)
        patches = values.reshape(len(values), *found.shape[2:], found.shape[1]).transpose(0, 3, 1, 2)
        assert np.array_equal(found[: rows * columns], levels(patches, model)[: rows * columns])
        return
    # What is left beyond whole patches no product sees.
    assert np.array_equal(found, levels(values, model)[:, : found.shape[1], : found.shape[2]])


def levels(values: np.ndarray, model: Any) -> np.ndarray:
    """Return normalised pixels ``[..., 3, height, width]`` as the bytes that they were."""
    mean, std = (np.array(each)[:, None, None] for each in (model.processing.mean, model.processing.std))
    return np.rint((values * std + mean) * 255).astype(np.uint8)
