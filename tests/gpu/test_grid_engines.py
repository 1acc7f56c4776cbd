"""The torch engines with a family of grids on a CUDA device, from graphs and without, beside numpy.

And on the CPU, so that the tests run where there is no card.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.engine.batch import PackedInput, pack
from tessera.engine.factory import make_text_engine, make_vision_engine
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tests.engine.packed_images import noise, packed, rows_for
from tests.families.byte_text import PLACEHOLDER
from tests.families.grid import Grid, reference, reference_rows

pytestmark = pytest.mark.gpu

MODEL = Grid(Path(), 3)


KINDS = {"graphs": ("cuda", "bfloat16", None), "plain": ("cuda", "bfloat16", 0), "cpu": ("cpu", "float32", 0)}


@pytest.fixture(params=KINDS)
def settings(request: pytest.FixtureRequest) -> EngineSettings:
    device, dtype, graphs = KINDS[request.param]
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return EngineSettings(
        dtype=dtype, device=device, max_batch_cost=512, max_queue_cost=512, graph_cost=graphs
    )


@pytest.mark.parametrize(
    "batches",
    [[[(8, 8)]], [[(64, 40), (24, 32)], [(8, 8)], [(40, 64)]], [[(64, 64)] * 2, [(8, 16)] * 12]],
    ids=str,
)
def test_rows_of_mixed_grids(settings: EngineSettings, batches: Sequence[Sequence[tuple[int, int]]]) -> None:
    """All batches are launched before the first is waited for, so that replays may not see one another."""
    engine = make_vision_engine(MODEL, settings, place(settings))
    engine.warm()
    launched = []
    for sizes in batches:
        images = [noise(MODEL, MODEL.plan(*size, param=""), seed) for seed, size in enumerate(sizes)]
        batch = packed(MODEL, images)
        placement = place(settings)
        out = rows_for(MODEL, batch, dtype=placement.torch_dtype, device=placement.device)
        if placement.is_cuda:
            torch.cuda.synchronize()
        launched.append((engine.launch(batch, out), out, images))
    for one, out, images in launched:
        one.result()
        for rows, image in zip(out, images, strict=True):
            expected = reference_rows(MODEL.seed, image, MODEL.unit_positions(image.plan))
            np.testing.assert_allclose(rows.float().cpu().numpy(), expected, rtol=0.01, atol=1e-4)
    engine.close()


def test_vectors_of_three_rows_of_positions_and_wide_vision_rows(settings: EngineSettings) -> None:
    engine = make_text_engine(MODEL, settings, place(settings))
    engine.warm()
    chance = np.random.default_rng(0)
    inputs = []
    for size in ((64, 40), None, (8, 24)):
        plans = [MODEL.plan(*size, param="")] if size else []
        count = sum(plan.rows for plan in plans)
        tokens = chance.integers(0, 256, count + 5, dtype=np.int32)
        tokens[2 : 2 + count] = PLACEHOLDER
        rows = torch.from_numpy(chance.standard_normal((count, MODEL.vision.row_width), dtype=np.float32))
        rows = rows.to(place(settings).torch_dtype)
        inputs.append(
            PackedInput(
                tokens=tokens,
                positions=MODEL.positions(tokens, plans),
                vision=(rows,) if plans else (),
                vision_index=MODEL.vision_index(tokens),
            )
        )
    found = engine.launch(pack(inputs)).result()
    for own, one in zip(found, inputs, strict=True):
        vision = (
            one.vision[0].float().numpy() if one.vision else np.empty((0, MODEL.vision.row_width), np.float32)
        )
        expected = reference(MODEL.seed, one.tokens, one.positions, vision)
        np.testing.assert_allclose(own.values[0] * own.norms[0], expected, rtol=1e-3, atol=1e-4)
    engine.close()
