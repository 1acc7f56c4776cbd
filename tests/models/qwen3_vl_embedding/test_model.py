"""What the family says of itself, its options, and the files that it refuses."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tessera.errors import CheckpointError, ConfigError, InvalidInput, UnsupportedMedia
from tessera.image_plan import ImagePlan
from tessera.imaging import Picture
from tessera.models import open_model
from tessera.models.base import OutputKind
from tessera.models.qwen3_vl_embedding.model import Qwen3VLEmbedding
from tessera.models.qwen3_vl_embedding.tensors import expected
from tessera_tools.random_checkpoint.qwen3 import VL_FULL
from tests.models.changing import changed
from tests.models.qwen3_vl_embedding.pictures import picture


def test_what_it_is(model: Qwen3VLEmbedding) -> None:
    assert model.family == "qwen3_vl_embedding"
    assert (model.output.kind, model.output.width) == (OutputKind.VECTOR, 128)
    assert model.vision.row_width == 4 * 128
    assert model.vision.unit_shape == (3, 16, 16)
    assert (model.vision.max_units, model.vision.max_rows) == (7200, 1800)
    assert model.vision.largest.grid == (1, 90, 80)
    assert model.vision.rows(24) == 6
    assert not model.vision.independent_units
    assert model.max_tokens == 8192
    assert model.vocab_size == 2048
    assert model.dimensions == frozenset(range(64, 128))


def test_the_published_control_tokens() -> None:
    names = (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
    )
    assert [VL_FULL.id_of(name) for name in names] == [151643, 151644, 151645, 151652, 151653, 151655]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_pixel": 4096}, "'min_pixel' is unknown to qwen3_vl_embedding; its options are min_pixels,"),
        ({"max_pixels": "many"}, r"`\$\.max_pixels`"),
        ({"max_pixels": 1000}, "max_pixels 1000 is below"),
        ({"min_pixels": 5000, "max_pixels": 4000}, "max_pixels 4000 is below min_pixels 5000"),
        ({"instruction": ""}, "instruction"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_options_that_make_no_sense(path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_model(path, options)


def test_limits_by_option(path: Path, model: Qwen3VLEmbedding) -> None:
    small = open_model(path, {"max_pixels": 1_310_720})
    assert small.plan(1275, 1650, param="x") == ImagePlan(units=4960, rows=1240, grid=(1, 80, 62))
    assert model.plan(1275, 1650, param="x") == ImagePlan(units=7104, rows=1776, grid=(1, 96, 74))
    assert small.vision is not None and small.vision.max_rows == 1280
    large = open_model(path, {"min_pixels": 65_536})
    assert large.plan(64, 64, param="x").rows == 64
    prints = {each.fingerprint for each in (model, small, large, open_model(path, {"max_tokens": 4096}))}
    assert len(prints) == 4
    assert open_model(path, {"max_pixels": 1_843_200}).fingerprint == model.fingerprint


def test_plans_and_pixels_agree(model: Qwen3VLEmbedding) -> None:
    for width, height in ((64, 64), (336, 336), (70, 500), (1000, 31)):
        pixels = model.preprocess(Picture(picture(width, height), param="x"))
        assert pixels.plan == model.plan(width, height, param="x")
        assert model.unit_positions(pixels.plan).shape == (4, pixels.plan.units)


def test_images_that_are_refused(model: Qwen3VLEmbedding) -> None:
    with pytest.raises(InvalidInput, match=r"input\[1\] is 2100x10"):
        model.plan(2100, 10, param="input[1]")
    with pytest.raises(InvalidInput, match="200 times the other"):
        model.preprocess(Picture(picture(2100, 10), param="x"))
    with pytest.raises(UnsupportedMedia):
        model.preprocess(Picture(b"no image", param="x"))


def test_memory_grows_with_the_batch(model: Qwen3VLEmbedding) -> None:
    assert model.vision_activation_nbytes("float32", 800) == 2 * model.vision_activation_nbytes(
        "float32", 400
    )
    assert model.text_nbytes("float32") + model.vision_nbytes("float32") == sum(
        math.prod(shape) * 4 for shape in expected(model.config).values()
    )


def test_the_processors_pixel_limits_are_not_read(
    path: Path, model: Qwen3VLEmbedding, tmp_path: Path
) -> None:
    size = {"shortest_edge": 1, "longest_edge": 2}
    copy = changed(path, tmp_path / "copy", "preprocessor_config.json", size=size)
    assert open_model(copy).plan(640, 480, param="x") == model.plan(640, 480, param="x")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.visual.deepstack_merger_list.2.linear_fc2.bias", "is missing"),
        ("model.language_model.layers.0.self_attn.k_norm.weight", "is missing"),
    ],
)
def test_tensors_that_are_missing(path: Path, tmp_path: Path, name: str, words: str) -> None:
    copy = changed(path, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    del tensors[name]
    save_file(tensors, copy / "model.safetensors")
    model = open_model(copy)
    for load in (model.load_vision, model.load_text):
        with pytest.raises(CheckpointError, match=words):
            load(dtype="float32", device="cpu")


def test_a_stored_head_is_left_alone_and_anything_else_refused(path: Path, tmp_path: Path) -> None:
    copy = changed(path, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    table = tensors["model.language_model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table.clone()}, copy / "model.safetensors")
    open_model(copy).load_text(dtype="float32", device="cpu")
    save_file(tensors | {"model.visual.extra": table.clone()}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected tensor 'model\.visual\.extra'"):
        open_model(copy).load_vision(dtype="float32", device="cpu")


def test_opening_prompts_and_preprocessing_need_no_torch(path: Path, tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(picture(90, 70))
    code = (
        "import sys, pathlib\n"
        "from tessera.imaging import Picture\n"
        "from tessera.models import open_model\n"
        "from tessera.models.base import Content, Truncate\n"
        "model = open_model(sys.argv[1])\n"
        "pixels = model.preprocess(Picture(pathlib.Path(sys.argv[2]).read_bytes(), param='x'))\n"
        "content = Content(parts=('a', pixels.plan))\n"
        "made = model.prompt(content, max_tokens=99, truncate=Truncate.NONE, param='x')\n"
        "model.positions(made.tokens, [pixels.plan]), model.unit_positions(pixels.plan)\n"
        "model.fingerprint, model.vision_activation_nbytes('bfloat16', 4), model.vision\n"
        "assert 'torch' not in sys.modules\n"
    )
    arguments = [str(path), str(tmp_path / "picture.png")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=180)


def test_images_of_one_batch_do_not_see_each_other(model: Qwen3VLEmbedding) -> None:
    from tests.models.running import cosines, vision_rows

    vision = model.load_vision(dtype="float32", device="cpu")
    one, other, third = (
        model.preprocess(Picture(picture(96, 64, seed=seed), param="x")) for seed in (1, 2, 3)
    )
    first = vision_rows(model, vision, [one, other])[0].numpy()
    second = vision_rows(model, vision, [one, third])[0].numpy()
    assert cosines(first, second).min() >= 0.999999
    assert np.abs(first - vision_rows(model, vision, [other])[0].numpy()).max() > 0.1
