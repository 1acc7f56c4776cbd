"""Each mistake that a forward pass may have moves some vector below the bars of the right one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.models import open_model
from tessera_tools.random_checkpoint.towers import CLIP_TINY, SIGLIP2_TINY, SIGLIP_TINY, TowersSpec
from tests.models.conftest import WriteCheckpoint
from tests.models.running import cosines
from tests.models.two_towers.cases import CASES
from tests.models.two_towers.test_parity import BARS, Record, computed, reference
from tests.references.towers import SiglipReference, TowersReference

pytestmark = pytest.mark.parity

SPECS: dict[str, TowersSpec] = {"clip": CLIP_TINY, "siglip": SIGLIP_TINY, "siglip2": SIGLIP2_TINY}


def identity(module: Any, name: str) -> None:
    setattr(module, name, torch.nn.Identity())


def no_norm_before_the_layers(wanted: TowersReference) -> None:
    identity(wanted.model.vision_model, "pre_layrnorm")


def no_final_norm_of_texts(wanted: TowersReference) -> None:
    identity(wanted.model.text_model, "final_layer_norm")


def no_final_norm_of_images(wanted: TowersReference) -> None:
    identity(wanted.model.vision_model, "post_layernorm")


def another_gelu(wanted: TowersReference) -> None:
    for module in wanted.model.modules():
        if hasattr(module, "activation_fn"):
            module.activation_fn = torch.nn.SiLU()


def exact_gelu(wanted: TowersReference) -> None:
    for module in wanted.model.modules():
        if hasattr(module, "activation_fn"):
            module.activation_fn = torch.nn.GELU()


def the_first_token_pooled(wanted: TowersReference) -> None:
    wanted.model.text_model.eos_token_id = wanted.model.config.text_config.bos_token_id


def no_start_token(wanted: TowersReference) -> None:
    tokens = wanted.tokens
    wanted.tokens = lambda text: tokens(text)[1:]  # type: ignore[method-assign]


def attention_to_both_sides(wanted: TowersReference) -> None:
    for layer in wanted.model.text_model.encoder.layers:
        attend = layer.self_attn.forward
        layer.self_attn.forward = lambda attend=attend, **given: attend(
            **given | {"attention_mask": None, "is_causal": False}
        )


def constants_of_the_other_kind(wanted: TowersReference) -> None:
    half = list(wanted.processor.image_mean) == [0.5] * 3
    wanted.processor.image_mean = [0.48145466, 0.4578275, 0.40821073] if half else [0.5] * 3
    wanted.processor.image_std = [0.26862954, 0.26130258, 0.27577711] if half else [0.5] * 3


def squashed(wanted: TowersReference) -> None:
    edge = wanted.processor.crop_size.height
    wanted.processor.size = {"height": edge, "width": edge}


def another_filter(wanted: TowersReference) -> None:
    wanted.processor.resample = 0


def no_padding(wanted: TowersReference) -> None:
    assert isinstance(wanted, SiglipReference)
    wanted.length = 0


def padding_unseen(wanted: TowersReference) -> None:
    assert isinstance(wanted, SiglipReference)
    features, pad = wanted.model.get_text_features, wanted.pad
    wanted.model.get_text_features = lambda input_ids: features(
        input_ids=input_ids, attention_mask=(input_ids != pad).long()
    )


def punctuation_kept(wanted: TowersReference) -> None:
    assert isinstance(wanted, SiglipReference)
    wanted.punctuation = "~"


def the_mean_of_patches(wanted: TowersReference) -> None:
    class Mean(torch.nn.Module):
        def forward(self, rows: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return rows.mean(1)

    wanted.model.vision_model.head = Mean()


def no_head_of_texts(wanted: TowersReference) -> None:
    head = wanted.model.text_model.head
    head.bias.data.zero_()


def _resized(name: str, **how: Any) -> Callable[[TowersReference], None]:
    def change(wanted: TowersReference) -> None:
        def resize(table: torch.Tensor, shapes: torch.Tensor, max_length: int) -> torch.Tensor:
            found = []
            for height, width in shapes.tolist():
                made = torch.nn.functional.interpolate(
                    table.permute(2, 0, 1)[None], size=(height, width), **how
                )
                rows = made[0].flatten(1).T
                padding = rows[:1].expand(max_length - len(rows), -1)
                found.append(torch.cat((rows, padding)))
            return torch.stack(found)

        wanted.model.vision_model.embeddings.resize_positional_embeddings = resize

    change.__name__ = name
    return change


positions_without_antialiasing = _resized("no_antialiasing", mode="bilinear", align_corners=False)
positions_by_the_corners = _resized("by_the_corners", mode="bilinear", align_corners=True)
positions_by_bicubic = _resized("bicubic", mode="bicubic", align_corners=False, antialias=True)


def padding_of_patches_seen(wanted: TowersReference) -> None:
    pixels = wanted.pixels

    def all_seen(data: bytes) -> dict[str, torch.Tensor]:
        found = pixels(data)
        return found | {"pixel_attention_mask": torch.ones_like(found["pixel_attention_mask"])}

    wanted.pixels = all_seen  # type: ignore[method-assign]


MISTAKES = {
    "clip": [
        no_norm_before_the_layers,
        no_final_norm_of_texts,
        no_final_norm_of_images,
        another_gelu,
        exact_gelu,
        the_first_token_pooled,
        no_start_token,
        attention_to_both_sides,
        constants_of_the_other_kind,
        squashed,
        another_filter,
    ],
    "siglip": [
        no_final_norm_of_images,
        no_final_norm_of_texts,
        another_gelu,
        no_padding,
        padding_unseen,
        punctuation_kept,
        the_mean_of_patches,
        no_head_of_texts,
        constants_of_the_other_kind,
        another_filter,
    ],
    "siglip2": [
        no_final_norm_of_images,
        no_final_norm_of_texts,
        another_gelu,
        padding_unseen,
        the_mean_of_patches,
        no_head_of_texts,
        constants_of_the_other_kind,
        positions_without_antialiasing,
        positions_by_the_corners,
        positions_by_bicubic,
        padding_of_patches_seen,
        no_padding,
        another_filter,
    ],
}


@pytest.fixture(scope="module", params=MISTAKES)
def found(request: pytest.FixtureRequest, written: WriteCheckpoint) -> tuple[str, Path, np.ndarray]:
    path = written(SPECS[request.param])
    return request.param, path, computed(open_model(path))


def test_every_mistake_fails_the_bar(found: tuple[str, Path, np.ndarray], record_property: Record) -> None:
    family, path, vectors = found
    worst = {}
    for mistake in MISTAKES[family]:
        wanted = reference(path)
        mistake(wanted)
        expected = np.stack([wanted.answer(given) for given in CASES])
        cosine = worst[mistake.__name__] = float(cosines(vectors, expected).min())
        line = f"{family:10}{mistake.__name__.replace('_', ' '):42}1 - worst cosine {1 - cosine:.2e}"
        record_property("parity of two towers with references that make one mistake", line)
    assert all(cosine < BARS["float32"] for cosine in worst.values()), worst
