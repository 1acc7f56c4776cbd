"""The networks at the real model's size, computed layer by layer beside torch.

Takes some ten minutes on two cores, 3.2 GB of disk and up to 12 GB of memory, so it runs only when
``TESSERA_FULL_SIZE`` is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import pytest
import torch

from tessera.models import open_model
from tessera.models.base import TextTensors
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera_engines.compiled.spec import Stage
from tessera_tools.random_checkpoint.checkpoint import main as make_checkpoint
from tests.tessera_engines.compiled.test_networks import TOKENS, Stages, worst_cosine

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("TESSERA_FULL_SIZE"), reason="TESSERA_FULL_SIZE is not set"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaNemotronVL]:
    path = tmp_path_factory.mktemp("full") / "checkpoint"
    make_checkpoint(["--out", str(path), "--size", "full", "--dtype", "bfloat16"])
    model = open_model(path)
    assert isinstance(model, LlamaNemotronVL)
    yield model
    (path / "model.safetensors").unlink()


@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.999999), ("float16", 0.9999)])
def test_vision(model: LlamaNemotronVL, dtype: str, least: float) -> None:
    tiles = torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (1, *model.vision.unit_shape), np.uint8)
    )
    with torch.inference_mode():
        bounds, places = torch.arange(2, dtype=torch.int32), torch.empty(0, 1, dtype=torch.int32)
        expected = model.load_vision(dtype="float32", device="cpu")(tiles, places, bounds, (1,))
        found = Stages(model, dtype)(Stage.VISION)(tiles=tiles)["rows"].flatten(0, 1)
    assert worst_cosine(found, expected) > least


def test_text(model: LlamaNemotronVL) -> None:
    lengths, images = (9, 37, 1), 5
    chance = np.random.default_rng(0)
    ids = torch.from_numpy(chance.integers(0, model.vocab_size, (len(lengths), TOKENS), dtype=np.int32))
    row_map = torch.full(ids.shape, -1, dtype=torch.int32)
    row_map[1, 3 : 3 + images] = torch.arange(images, dtype=torch.int32)
    rows = torch.from_numpy(
        chance.standard_normal((images, model.vision.row_width), dtype=np.float32)
    ).bfloat16()
    packed = torch.cat([line[:length] for line, length in zip(ids, lengths, strict=True)])
    with torch.inference_mode():
        expected = model.load_text(dtype="bfloat16", device="cpu")(
            TextTensors(
                packed,
                torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])[None],
                torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
                lengths,
                rows,
                torch.arange(lengths[0] + 3, lengths[0] + 3 + images, dtype=torch.int32),
            )
        )
        found = Stages(model, "bfloat16")(Stage.TEXT)(
            input_ids=ids,
            vision_row=row_map,
            vision_rows=rows,
            lengths=torch.tensor(lengths, dtype=torch.int32),
        )
    assert worst_cosine(found["vectors"], expected) > 0.999
    torch.testing.assert_close(found["norms"], expected.norm(dim=1), rtol=0.01, atol=0)
