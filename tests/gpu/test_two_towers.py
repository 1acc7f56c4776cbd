"""Both engines of two towers on the card, from graphs, without, and in FP8, beside float32 from a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.engine.batch import pack_images
from tessera.engine.factory import make_text_engine, make_vision_engine
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.models import open_model
from tests.models.running import batch_of, cosines, preprocessed
from tests.references.carry import ALL

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

NAMES = ("clip", "siglip", "siglip_wide_heads", "siglip2")
KINDS = ("graphs", "plain", "fp8")
BARS = {"fp8": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return tmp_path_factory.mktemp("towers")


def settings(kind: str, most: int) -> EngineSettings:
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a CUDA device of capability 8.9 or above")
    return EngineSettings(
        max_batch_cost=most,
        max_queue_cost=most,
        graph_cost=0 if kind == "plain" else None,
        quantization="fp8" if kind == "fp8" else "none",
        unquantized_blocks=0,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_vectors(name: str, kind: str, folder: Path) -> None:
    carried = ALL[name]
    model = open_model(carried.checkpoint(folder))
    texts = [number for number, given in enumerate(carried.inputs) if not given.images]  # type: ignore[union-attr]
    images = np.setdiff1d(np.arange(len(carried.inputs)), texts)
    found = np.empty_like(carried.vectors())
    chosen = settings(kind, 4096)
    text = make_text_engine(model, chosen, place(chosen))
    text.warm()
    chosen = settings(kind, 16)
    vision = make_vision_engine(model, chosen, place(chosen))
    vision.warm()
    pixels = list(preprocessed(model, carried.inputs).values())
    # Twice, because a replay writes where the one before it did.
    for _ in range(2):
        batch = batch_of(model, None, [carried.inputs[number] for number in texts])
        found[texts] = text.launch(batch).result().values
        packed = pack_images(pixels, [model.unit_positions(each.plan) for each in pixels])
        out = [torch.empty(1, model.output.width, dtype=torch.bfloat16, device="cuda") for _ in pixels]
        torch.cuda.synchronize()
        vision.launch(packed, out).result()
        found[images] = torch.cat(out).float().cpu().numpy()
        cosine = cosines(found, carried.vectors()).min()
        print(f"{name:20}{kind:8}worst cosine {cosine:.7f} of {len(found)}")
        assert cosine >= BARS.get(kind, 0.998)
    text.close()
    vision.close()
