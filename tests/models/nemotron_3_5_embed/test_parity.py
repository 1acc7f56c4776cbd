"""Against transformers' own modules reading the same files, and against the same with likely mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tessera.models.nemotron_3_5_embed.model import Nemotron35Embed, Options
from tessera_tools.random_checkpoint.ministral3 import VL_TINY, Nemotron35Spec
from tests.models.conftest import WriteCheckpoint
from tests.models.nemotron_3_5_embed.cases import CASES
from tests.models.parity import BARS, Parity, Record
from tests.models.running import cosines, nearest, preprocessed, prompts, vision_rows
from tests.references.mistral3 import PROMPTS, Mistral3Reference

pytestmark = pytest.mark.parity

PARITY = Parity(title="nemotron_3_5_embed", cases=CASES)
CONFIGURATIONS: dict[str, Nemotron35Spec] = {
    "tiny": VL_TINY,
    "model. before names, biases, GELU, a mark first": replace(
        VL_TINY,
        layers=3,
        text_prefix="model.language_model.",
        shards=2,
        marks="bos",
        projector_bias=True,
        vision_activation="gelu",
        vision_heads=4,
        nested_processor=True,
        longest_edge=300,
    ),
    "patches of 16, last": replace(
        VL_TINY, hidden=192, patch_size=16, pooling="last", declares=False, vision_layers=3
    ),
}

Built = tuple[str, Nemotron35Embed, Mistral3Reference, np.ndarray]
"""The configuration, the model, its reference and the reference's vectors of ``CASES``."""


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def built(request: pytest.FixtureRequest, written: WriteCheckpoint) -> Built:
    path = written(CONFIGURATIONS[request.param], dtype="bfloat16")
    reference = Mistral3Reference(path)
    return request.param, Nemotron35Embed(path, Options()), reference, PARITY.expected(reference)


def test_tokens_and_pixels_are_the_processors(built: Built) -> None:
    _, model, reference, _ = built
    pixels = preprocessed(model, CASES)
    for given, made in zip(CASES, prompts(model, CASES, pixels), strict=True):
        theirs = reference.processed(given)
        assert made.tokens.tolist() == theirs["input_ids"][0].tolist()
        for place, image in enumerate(given.images):
            own, size = pixels[image], theirs["image_sizes"][place].tolist()
            assert own.plan.grid is not None
            patch = model.config.vision.patch_size
            assert [side * patch for side in own.plan.grid[1:]] == size
            _, high, wide = own.plan.grid
            blocks = own.values.reshape(high // 2, wide // 2, 2, 2, 3, patch, patch)
            whole = blocks.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, *size)
            levels = (whole / 255 - _channel(model.config.processing.mean)) / _channel(
                model.config.processing.std
            )
            expected = theirs["pixel_values"][place, :, : size[0], : size[1]].numpy()
            np.testing.assert_allclose(levels, expected, atol=1e-5)


def _channel(values: tuple[float, ...]) -> np.ndarray:
    return np.array(values)[:, None, None]


@torch.no_grad()
def test_patches_and_rows_of_every_image_together(built: Built) -> None:
    _, model, reference, _ = built
    vision = model.load_vision(dtype="float32", device="cpu")
    pixels = list(preprocessed(model, CASES).values())
    kept: list[torch.Tensor] = []
    vision.projector.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    found = vision_rows(model, vision, pixels)
    made = reference.processed(CASES[-1])
    images = list(preprocessed(model, CASES[-1:]))
    names = list(preprocessed(model, CASES))
    expected = dict(
        zip(images, reference.rows(made["pixel_values"].float(), made["image_sizes"]), strict=True)
    )
    states = reference.patches(made["pixel_values"].float(), made["image_sizes"])
    own = dict(zip(names, kept[0].split([each.plan.units for each in pixels]), strict=True))
    start = 0
    for image in images:
        theirs = expected[image]
        assert cosines(found[names.index(image)].numpy(), theirs.numpy()).min() >= BARS["float32"]
        _, high, wide = pixels[names.index(image)].plan.grid or (1, 0, 0)
        block = own[image].view(high // 2, wide // 2, 2, 2, -1).transpose(1, 2).reshape(high * wide, -1)
        assert cosines(block.numpy(), states[start : start + high * wide].numpy()).min() >= BARS["float32"]
        start += high * wide


@pytest.mark.parametrize("dtype", BARS)
def test_vectors(built: Built, dtype: str, record_property: Record) -> None:
    name, model, _, expected = built
    PARITY.check(name, model, expected, dtype, record_property)


def test_the_parts_of_the_reference_are_its_whole(path: Path) -> None:
    """transformers' one call of ``Mistral3Model``, which reads ``is_causal`` itself."""
    reference = Mistral3Reference(path)
    for given in CASES:
        assert cosines(reference.whole(given)[None], reference.answer(given)[None])[0] >= 0.999999


@pytest.fixture(scope="module")
def path(written: WriteCheckpoint) -> Path:
    return written(VL_TINY, dtype="bfloat16")


@pytest.fixture(scope="module")
def found(path: Path) -> np.ndarray:
    """Our vectors of ``CASES``, to be compared with references that make a mistake."""
    return PARITY.found(Nemotron35Embed(path, Options()), "float32")


def test_the_cases_are_far_apart(found: np.ndarray) -> None:
    assert nearest(found) < 0.995


MISTAKES: dict[str, Callable[[Mistral3Reference, Any], None]] = {}


def mistake(make: Callable[[Mistral3Reference, Any], None]) -> Callable[[Mistral3Reference, Any], None]:
    MISTAKES[make.__name__.replace("_", " ")] = make
    return make


@mistake
def attention_to_the_left_alone(reference: Mistral3Reference, _: Any) -> None:
    reference.causal = True


@mistake
def last_token(reference: Mistral3Reference, _: Any) -> None:
    reference.pool = lambda hidden: hidden[-1]


@mistake
def half_of_the_tokens_in_the_mean(reference: Mistral3Reference, _: Any) -> None:
    reference.pool = lambda hidden: hidden[: max(1, len(hidden) // 2)].mean(0)


@mistake
def no_prompts(_: Mistral3Reference, patched: pytest.MonkeyPatch) -> None:
    for role in ("query", "passage"):
        patched.setitem(PROMPTS, role, "")


@mistake
def no_marks_between_rows(reference: Mistral3Reference, _: Any) -> None:
    whole = reference.processed

    def bare(given: Any) -> dict[str, Any]:
        made = whole(given)
        ids = made["input_ids"]
        tokenizer = reference.tokenizer
        marks = tokenizer.convert_tokens_to_ids(["[IMG_BREAK]", "[IMG_END]"])
        return made | {"input_ids": ids[:, ~torch.isin(ids[0], torch.tensor(marks))]}

    reference.processed = bare


@mistake
def rows_that_all_end_alike(reference: Mistral3Reference, _: Any) -> None:
    whole = reference.processed

    def alike(given: Any) -> dict[str, Any]:
        made = whole(given)
        row_end, image_end = reference.tokenizer.convert_tokens_to_ids(["[IMG_BREAK]", "[IMG_END]"])
        ids = made["input_ids"]
        return made | {"input_ids": torch.where(ids == image_end, row_end, ids)}

    reference.processed = alike


@mistake
def rows_and_columns_exchanged(reference: Mistral3Reference, _: Any) -> None:
    rotary = reference.model.vision_tower.patch_positional_embedding
    right = rotary.recomposition_frequencies
    rotary.recomposition_frequencies = lambda values: right(values.flip(1))


@mistake
def the_same_frequencies_for_rows_and_columns(reference: Mistral3Reference, _: Any) -> None:
    rotary = reference.model.vision_tower.patch_positional_embedding
    half = len(rotary.inv_freq) // 2
    rotary.inv_freq = rotary.inv_freq[:half].repeat(2)


@mistake
def no_norm_before_the_layers(reference: Mistral3Reference, _: Any) -> None:
    reference.model.vision_tower.ln_pre = nn.Identity()


@mistake
def no_norm_before_the_merge(reference: Mistral3Reference, _: Any) -> None:
    reference.model.multi_modal_projector.norm = nn.Identity()


@mistake
def patches_of_a_row_before_its_channels(reference: Mistral3Reference, _: Any) -> None:
    merging = reference.model.multi_modal_projector.patch_merger.merging_layer
    weight = merging.weight.data
    merging.weight.data = weight.view(len(weight), 4, -1).transpose(1, 2).reshape(weight.shape)


@mistake
def silu_in_the_projector(reference: Mistral3Reference, _: Any) -> None:
    reference.model.multi_modal_projector.act = nn.SiLU()


@mistake
def gelu_in_the_tower(reference: Mistral3Reference, _: Any) -> None:
    for layer in reference.model.vision_tower.transformer.layers:
        layer.feed_forward.act_fn = nn.GELU()


@mistake
def pixels_without_their_mean(reference: Mistral3Reference, _: Any) -> None:
    reference.pictures.image_mean = [0.5, 0.5, 0.5]


@mistake
def queries_without_their_scale(reference: Mistral3Reference, _: Any) -> None:
    reference.model.language_model.config.rope_parameters["llama_4_scaling_beta"] = 0.0


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_fails_the_bar(
    name: str, found: np.ndarray, path: Path, record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Mistral3Reference(path)
    MISTAKES[name](reference, monkeypatch)
    PARITY.check_mistake(name, reference, found, record_property, bar="float32")
