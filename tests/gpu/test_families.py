"""Every family's vectors in bfloat16 on the card, beside float32 vectors of transformers from a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessera.models import open_model
from tessera.models.base import OutputKind
from tests.models.running import batch_of, cosines, error, preprocessed, vectors, vision_rows
from tests.references.carry import ALL

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

BARS = {"bfloat16": 0.998, "float32": 0.9999}
"""In bfloat16 one form of GELU for the other is within the noise; in float32 it is not."""
SCORE_BARS = {"bfloat16": 0.045, "float32": 0.001}
"""Of logits: differences, as shares of how far the logits deviate; on an H200 0.0246 at most in bfloat16."""

PICTURE_BAR = 0.15
"""Of images through layers of random weights in bfloat16, 0.106 at most on an H100."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return tmp_path_factory.mktemp("carried")


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("name", ALL)
def test_vectors(name: str, dtype: str, folder: Path) -> None:
    carried = ALL[name]
    model = open_model(carried.checkpoint(folder))
    vision = model.load_vision(dtype=dtype, device="cuda") if model.vision else None
    text = model.load_text(dtype=dtype, device="cuda")
    found = vectors(model, text, batch_of(model, vision, carried.inputs))
    if model.output.kind is OutputKind.SCORE:
        difference = error(found, carried.vectors())
        print(f"{name:32}{dtype:10}worst difference {difference:.5f} of a deviation")
        assert difference <= (
            PICTURE_BAR if name == "qwen3_vl_rerank" and dtype == "bfloat16" else SCORE_BARS[dtype]
        )
        return
    cosine = cosines(found, carried.vectors())
    print(
        f"{name:32}{dtype:10}worst cosine {cosine.min():.7f}  each {' '.join(f'{one:.5f}' for one in cosine)}"
    )
    assert cosine.min() >= BARS[dtype]


@pytest.mark.parametrize("name", [name for name, each in ALL.items() if "vl" in name and not each.full_size])
def test_mixed_grids_in_one_launch(name: str, folder: Path) -> None:
    """Rows of images side by side are those of each image alone, and near those in float32."""
    model = open_model(ALL[name].checkpoint(folder))
    pixels = list(preprocessed(model, ALL[name].inputs).values())
    half, whole = (model.load_vision(dtype=dtype, device="cuda") for dtype in ("bfloat16", "float32"))
    for together, each, exact in zip(
        vision_rows(model, half, pixels), pixels, vision_rows(model, whole, pixels), strict=True
    ):
        (alone,) = vision_rows(model, half, [each])
        apart = cosines(together.float().cpu().numpy(), alone.float().cpu().numpy())
        assert apart.min() >= 0.9995
        assert cosines(together.float().cpu().numpy(), exact.float().cpu().numpy()).min() >= BARS["bfloat16"]
