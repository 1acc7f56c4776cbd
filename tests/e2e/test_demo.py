"""The demonstration model retrieves well through the service, and would not with a stage broken."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest
from training.client import Client, Input
from training.evaluate import World, measure
from training.world.grammar import describe

import tessera
from tests.e2e.service import launch
from tests.references.llama_nemotron_vl import Reference

pytestmark = pytest.mark.service

DEMO = Path(tessera.__file__).parent / "checkpoints" / "tessera-demo"


async def test_the_demonstration_model_retrieves(tmp_path: Path) -> None:
    """The figures of ``python -m training.evaluate`` at reduced size, and vectors as the reference has them.

    Retrieval alone forgives a wrong prefix or another order of tiles; the vectors do not. Broken on purpose,
    with 20 images: pooling of the last token, recall 0.55, least cosine 0.15; no vision rows, 0.05 and 0.00;
    tiles reversed, 1.00 and 0.89; rows off by one, 1.00 and 0.997; no prefix, 1.00 and 0.849.
    """
    world = World.make(24, seed=1)
    with launch("agg.sh", DEMO, tmp_path / "log", workers=1) as service:
        async with httpx.AsyncClient(timeout=150) as http:
            client = Client(http, service.url, "tessera-random", progress=False)
            figures = await measure(client, world, variants=8, documents=8)
            text = describe(world.compositions[0], world.source)
            image, wide = world.images[0], max(world.images, key=len)
            cases = [
                (Input(text=text), "query"),
                (Input(text=text), "passage"),
                (Input(image=image), "passage"),
                (Input(image=wide, text=text), "passage"),
            ]
            served = [await client.embed("one", [one], role=role) for one, role in cases]
    assert all(figure.good for figure in figures), "\n".join(map(str, figures))
    reference = Reference(DEMO)
    for (one, role), vectors in zip(cases, served, strict=True):
        expected = reference.vector(one.text, [one.image] if one.image else [], role)
        assert float(np.dot(vectors[0], expected)) > 0.9999


def test_the_checkpoint_is_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in DEMO.iterdir()) <= 12_000_000
