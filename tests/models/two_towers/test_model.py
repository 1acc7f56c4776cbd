"""What the files of a checkpoint say, what is refused of them, and images of unusual shapes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from tessera.errors import ConfigError
from tessera.imaging import MAX_PIXELS, Picture
from tessera.models import open_model
from tessera.models.base import ImagePlan
from tessera.models.siglip2.model import Siglip2
from tessera.models.siglip2.patches import grid_of
from tessera.models.siglip2.vision import taps
from tessera_tools.random_checkpoint.towers import (
    CLIP_TINY,
    SIGLIP2_TINY,
    SIGLIP_TINY,
    TowersSpec,
)
from tests.models.changing import changed, edit
from tests.models.conftest import WriteCheckpoint
from tests.models.qwen3_vl_embedding.pictures import picture
from tests.models.two_towers.test_parity import computed

SPECS: dict[str, TowersSpec] = {"clip": CLIP_TINY, "siglip": SIGLIP_TINY, "siglip2": SIGLIP2_TINY}
PROCESSOR = "preprocessor_config.json"


@pytest.mark.parametrize("name", SPECS)
def test_what_it_is(name: str, written: WriteCheckpoint) -> None:
    path = written(SPECS[name])
    model = open_model(path)
    assert model.family == name and model.vision is not None
    assert model.vision.gives_output and model.vision.row_width == model.output.width
    assert (model.vision.max_units, model.vision.max_rows) == (1, 1)
    # Every tensor is read but the scale and the bias of the training's logits.
    weights = load_file(path / "model.safetensors")
    stored = sum(value.size for key, value in weights.items() if not key.startswith("logit"))
    assert model.vision_nbytes("float32") + model.text_nbytes("float32") == 4 * stored
    assert model.vision_activation_nbytes("float32", 2) > model.vision_activation_nbytes("bfloat16", 2) > 0
    with pytest.raises(ConfigError, match="no stages"):
        model.load_stage("text", layout="padded", dtype="float32", device="cpu")  # type: ignore[attr-defined]


def test_files_of_the_first_years(written: WriteCheckpoint, tmp_path: Path) -> None:
    """Sizes in ``..._config_dict``, which wins, numbers in place of sizes, and tables that are computed."""

    source = written(CLIP_TINY)
    config = json.loads((source / "config.json").read_text())
    older: dict[str, Any] = {}
    for tower in ("text_config", "vision_config"):
        older |= {f"{tower}_dict": config[tower], tower: {"hidden_size": 32}}
    path = changed(source, tmp_path / "older", **older)
    edge = CLIP_TINY.image_size
    edit(path / PROCESSOR, size=edge, crop_size=edge)
    assert np.array_equal(computed(open_model(path)), computed(open_model(source)))


def test_a_processor_in_the_newer_file(written: WriteCheckpoint, tmp_path: Path) -> None:
    source = written(SIGLIP_TINY)
    path = changed(source, tmp_path / "newer")
    content = json.loads((path / PROCESSOR).read_text()) | {"resample": 2}
    (path / PROCESSOR).unlink()
    (path / "processor_config.json").write_text(json.dumps({"image_processor": content}))
    newer, model = open_model(path), open_model(source)
    given = Picture(picture(200, 90), param="x")
    assert not np.array_equal(newer.preprocess(given).values, model.preprocess(given).values)
    assert newer.fingerprint != model.fingerprint


def test_a_strip_is_cut_without_all_of_it(written: WriteCheckpoint) -> None:
    """One that would have 17 million pixels: as the reference cuts it, but for two levels of 255."""
    file = picture(4_200, 1)
    found = open_model(written(CLIP_TINY)).preprocess(Picture(file, param="x")).values[0]
    image = Image.open(io.BytesIO(file))
    width = 64 * 4_200
    whole = image.resize((width, 64), Image.Resampling.BICUBIC)
    middle = whole.crop(((width - 64) // 2, 0, (width + 64) // 2, 64))
    expected = np.asarray(middle).transpose(2, 0, 1)
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 2


@pytest.mark.parametrize("most", [16, 256, 1024])
@pytest.mark.parametrize(
    "size", [(1, 1), (16, 16), (640, 427), (427, 640), (3000, 40), (5000, 4000), (17, 999)]
)
def test_grids_are_those_of_the_reference(size: tuple[int, int], most: int) -> None:
    from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

    width, height = size
    rows, columns = get_image_size_for_max_num_patches(height, width, 16, most)
    assert grid_of(width, height, patch=16, most=most) == (rows // 16, columns // 16)


@pytest.mark.parametrize("grid", [(4, 4), (1, 16), (3, 5), (16, 2), (7, 9), (31, 8)])
def test_positions_are_resized_as_the_reference_does(grid: tuple[int, int]) -> None:
    rows, columns = grid
    table = torch.from_numpy(np.random.default_rng(0).standard_normal((7 * 7, 12)).astype(np.float32))
    found, mask = taps(torch.tensor([[rows], [columns]]), 256, 7)
    assert mask.sum() == rows * columns
    wanted = torch.nn.functional.interpolate(
        table.T.view(1, 12, 7, 7), size=grid, mode="bilinear", align_corners=False, antialias=True
    )
    torch.testing.assert_close(
        (found[0] @ table)[: rows * columns], wanted[0].flatten(1).T, atol=1e-5, rtol=1e-5
    )


def test_options_of_siglip2(written: WriteCheckpoint) -> None:
    path = written(SIGLIP2_TINY)
    model = open_model(path, {"max_num_patches": 40})
    assert isinstance(model, Siglip2) and model.unit_shape == (40, 3, 16, 16)
    assert model.plan(640, 480, param="x") == ImagePlan(units=1, rows=1, grid=(1, 5, 7))
    assert open_model(path).fingerprint != model.fingerprint
    # The narrowest that an image may be.
    for side in (MAX_PIXELS, 1):
        plan = model.plan(side, MAX_PIXELS // side, param="x")
        assert plan.grid is not None and plan.grid[1] * plan.grid[2] <= 40
    with pytest.raises(ConfigError, match="max_num_patches 8 is below 16"):
        open_model(path, {"max_num_patches": 8})


def test_texts_as_they_are(written: WriteCheckpoint) -> None:
    path = written(SIGLIP_TINY)
    tokens = {
        texts: open_model(path, {"texts": texts}).pieces("The River!", role="none", param="x")  # type: ignore[arg-type]
        for texts in ("auto", "canonical", "lower", "as_is")
    }
    assert tokens["auto"] == tokens["canonical"] != tokens["lower"] != tokens["as_is"]
    # The places are those of the client's own text.
    assert (tokens["auto"][0].start, tokens["auto"][-2].stop) == (0, 9)
