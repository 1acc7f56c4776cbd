"""The sizes that images are resized to, and the limits of that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tessera.errors import CheckpointError, InvalidInput
from tessera.imaging import Picture
from tessera.models import open_model
from tessera.models.qwen3_vl_embedding.body import Qwen3VLBody
from tessera.models.qwen3_vl_embedding.resize import Limits
from tessera_tools.load.bodies import jpeg
from tessera_tools.random_checkpoint import qwen3
from tessera_tools.random_checkpoint.spec import Spec
from tests.models.changing import changed
from tests.models.conftest import WriteCheckpoint
from tests.references.colembed import NemotronColEmbedReference
from tests.references.qwen3 import ColQwen3Reference, resized

PUBLISHED = Limits(edge=32, min_pixels=4_096, max_pixels=1_843_200)
TRAINED = Limits(edge=32, min_pixels=4_096, max_pixels=1_310_720)

# (width, height): size and rows by the reference's limits, then by those of training
VECTORS = {
    (512, 512): ((512, 512), 256, (512, 512), 256),
    (640, 480): ((640, 480), 300, (640, 480), 300),
    (1275, 1650): ((1184, 1536), 1776, (992, 1280), 1240),
    (1920, 1080): ((1792, 992), 1736, (1504, 832), 1222),
    (2048, 2048): ((1344, 1344), 1764, (1120, 1120), 1225),
    (1000, 300): ((992, 288), 279, (992, 288), 279),
    (3000, 500): ((3008, 512), 1504, (2784, 448), 1218),
    (336, 336): ((320, 320), 100, (320, 320), 100),  # 10.5 is rounded to even
    (16, 16): ((64, 64), 4, (64, 64), 4),
    (48, 48): ((64, 64), 4, (64, 64), 4),
    (80, 48): ((64, 64), 4, (64, 64), 4),
    (10, 1000): ((32, 992), 31, (32, 992), 31),
    (4000, 3000): ((1536, 1152), 1728, (1312, 960), 1230),
}


@pytest.mark.parametrize("size", VECTORS)
def test_published_sizes(size: tuple[int, int]) -> None:
    resized, rows, trained, trained_rows = VECTORS[size]
    assert PUBLISHED.resized(*size, param="x") == resized
    assert resized[0] * resized[1] // 1024 == rows
    assert TRAINED.resized(*size, param="x") == trained
    assert trained[0] * trained[1] // 1024 == trained_rows


@pytest.mark.parity
@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_the_rule_of_transformers(width: int, height: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    if max(width, height) > 200 * min(width, height):
        return
    for limits in (PUBLISHED, TRAINED):
        high, wide = smart_resize(height, width, 32, limits.min_pixels, limits.max_pixels)
        scaled_up = replace(limits, least_side=0)
        assert scaled_up.resized(width, height, param="x") == (wide, high)
        assert wide * high // 1024 <= scaled_up.most_rows
        if min(width, height) > 16:
            assert limits.resized(width, height, param="x") == (wide, high)


@pytest.mark.parametrize(
    ("spec", "limits"),
    [
        (qwen3.COLEMBED_TINY, NemotronColEmbedReference.limits),
        (qwen3.COL_TINY, ColQwen3Reference.limits),
    ],
)
def test_families_of_the_rule_of_transformers(
    spec: Spec, limits: tuple[int, int], written: WriteCheckpoint
) -> None:
    """Strips of which a side rounds to nothing are scaled up."""
    model = open_model(written(spec))
    for size in ((500, 10), (3, 90), (1, 1), (1, 200)):
        wide, high = resized(*size, *limits)
        assert model.plan(*size, param="x").grid == (1, high // 16, wide // 16)


@pytest.mark.parametrize("spec", [qwen3.COLEMBED_TINY, qwen3.COL_TINY])
def test_the_filter_that_a_processor_has(spec: Spec, written: WriteCheckpoint, tmp_path: Path) -> None:
    """Files of Qwen3-VL-Embedding may say what they like: other code resizes there."""
    picture = Picture(jpeg(Image.linear_gradient("L").resize((130, 70)).convert("RGB")), param="x")

    def opened(name: str, **settings: object) -> Qwen3VLBody:
        copy = changed(written(spec), tmp_path / name, "preprocessor_config.json", **settings)
        model = open_model(copy)
        assert isinstance(model, Qwen3VLBody)
        return model

    for model, resample in (
        (opened("as it is"), Image.Resampling.BICUBIC),
        (opened("bilinear", resample=2), Image.Resampling.BILINEAR),
    ):
        size = model.resized(*picture.size, "x")
        wanted = model.patched.cut(picture, size, resample, np.empty)
        assert (model.preprocess(picture).values == wanted).all()
    for name, value in (("resample", 1), ("do_resize", False), ("temporal_patch_size", 1)):
        with pytest.raises(CheckpointError, match=f"preprocessor_config.json: {name}"):
            opened(name, **{name: value})


def test_strips_are_refused() -> None:
    assert PUBLISHED.resized(2000, 10, param="x")
    with pytest.raises(InvalidInput, match=r"input\[2\] is 2001x10.*200 times") as caught:
        PUBLISHED.resized(2001, 10, param="input[2]")
    assert caught.value.param == "input[2]"
    with pytest.raises(InvalidInput):
        PUBLISHED.resized(10, 2001, param="x")


@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.integers(1, 400_000),
    st.integers(0, 400_000),
)
def test_every_size_is_whole_and_within_its_limits(width: int, height: int, least: int, more: int) -> None:
    limits = Limits(edge=32, min_pixels=least, max_pixels=max(1024, least + more))
    if max(width, height) > 200 * min(width, height):
        return
    wide, high = limits.resized(width, height, param="x")
    assert wide % 32 == 0 and high % 32 == 0 and wide and high
    assert wide * high // 1024 <= limits.most_rows
    if least <= 4096 and more > 40_000:
        assert least <= wide * high <= limits.max_pixels


def test_small_limits_leave_no_side_empty() -> None:
    limits = Limits(edge=32, min_pixels=1, max_pixels=4096)
    assert limits.resized(1000, 10, param="x") == (128, 32)
    assert limits.resized(10, 1000, param="x") == (32, 128)
    assert limits.resized(3000, 2000, param="x") == (64, 32)
    assert limits.most_rows == 4


def test_the_published_limits_are_kept_exactly() -> None:
    assert PUBLISHED.most_rows == 1800
    assert TRAINED.most_rows == 1280
