"""Every family's vectors in bfloat16 on the card, beside float32 vectors of transformers from a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessera.models import open_model
from tests.models.carrying import BARS, assert_carried
from tests.models.running import cosines, preprocessed, vision_rows
from tests.references.carry import ALL

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("carried")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return str(request.param)


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("name", ALL)
def test_vectors(name: str, dtype: str, device: str, folder: Path) -> None:
    """On the CPU ``tests/models/test_carried.py`` does the same."""
    assert_carried(ALL[name], folder, dtype=dtype, device=device)


@pytest.mark.parametrize("device", ["cpu", "cuda"], indirect=True)
@pytest.mark.parametrize("name", [name for name, each in ALL.items() if "vl" in name and not each.full_size])
def test_mixed_grids_in_one_launch(name: str, device: str, folder: Path) -> None:
    """Rows of images side by side are those of each image alone, and near those in float32."""
    model = open_model(ALL[name].checkpoint(folder))
    pixels = list(preprocessed(model, ALL[name].inputs).values())
    half, whole = (model.load_vision(dtype=dtype, device=device) for dtype in ("bfloat16", "float32"))
    for together, each, exact in zip(
        vision_rows(model, half, pixels), pixels, vision_rows(model, whole, pixels), strict=True
    ):
        (alone,) = vision_rows(model, half, [each])
        apart = cosines(together.float().cpu().numpy(), alone.float().cpu().numpy())
        assert apart.min() >= 0.9995
        assert cosines(together.float().cpu().numpy(), exact.float().cpu().numpy()).min() >= BARS["bfloat16"]
