"""Likely mistakes, each made in the reference: the vectors of the test set tell every one of them.

Without this, a bar for the cosine says nothing: of 11 inputs and random weights it might pass a forward pass
that leaves a part out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.models.parity import Parity, Record
from tests.models.qwen3_vl_embedding.cases import CASES
from tests.models.qwen3_vl_embedding.test_parity import BAR, BFLOAT16_BAR
from tests.models.running import cosines
from tests.references.qwen3 import Qwen3VLReference

pytestmark = pytest.mark.parity

PARITY = Parity(
    title="qwen3_vl_embedding",
    cases=list(CASES.values()),
    bars={"float32": BAR, "bfloat16": BFLOAT16_BAR},
)
Mistake = Callable[[Qwen3VLReference], None]

MISTAKES: dict[str, Mistake] = {}

TOO_FINE_FOR_BFLOAT16 = (
    "tanh gelu in the mergers",
    "erf gelu in the vision blocks",
    "deepstack norm before joining",
)
"""What the wider bar for bfloat16 need not tell."""


def mistake(make: Mistake) -> Mistake:
    MISTAKES[make.__name__.replace("_", " ")] = make
    return make


def mergers(reference: Qwen3VLReference) -> list[nn.Module]:
    return [reference.model.visual.merger, *reference.model.visual.deepstack_merger_list]


@mistake
def tanh_gelu_in_the_mergers(reference: Qwen3VLReference) -> None:
    for merger in mergers(reference):
        merger.act_fn = nn.GELU(approximate="tanh")


@mistake
def erf_gelu_in_the_vision_blocks(reference: Qwen3VLReference) -> None:
    for block in reference.model.visual.blocks:
        block.mlp.act_fn = nn.GELU()


@mistake
def deepstack_dropped(reference: Qwen3VLReference) -> None:
    reference.model.language_model._deepstack_process = lambda hidden, mask, rows: hidden


@mistake
def deepstack_levels_in_reverse(reference: Qwen3VLReference) -> None:
    whole = reference.vision_rows

    def reversed_levels(*image: Any) -> torch.Tensor:
        main, *levels = whole(*image).split(reference.config["text_config"]["hidden_size"], 1)
        return torch.cat([main, *reversed(levels)], 1)

    reference.vision_rows = reversed_levels


@mistake
def deepstack_norm_before_joining(reference: Qwen3VLReference) -> None:
    width = reference.config["vision_config"]["hidden_size"]

    def apart(norm: nn.LayerNorm, rows: torch.Tensor) -> torch.Tensor:
        normed = nn.functional.layer_norm(rows.view(-1, width), (width,), eps=norm.eps).view_as(rows)
        return normed * norm.weight + norm.bias

    for merger in reference.model.visual.deepstack_merger_list:
        merger.norm.forward = partial(apart, merger.norm)


@mistake
def one_dimensional_positions(reference: Qwen3VLReference) -> None:
    reference.flat_positions = True


@mistake
def chunked_mrope(reference: Qwen3VLReference) -> None:
    rotary = reference.model.language_model.rotary_emb

    def chunked(values: torch.Tensor) -> torch.Tensor:
        axes = torch.arange(3).repeat_interleave(torch.tensor(rotary.mrope_section))
        picked = torch.stack([values[axis, ..., place] for place, axis in enumerate(axes.tolist())], dim=-1)
        return torch.cat((picked, picked), dim=-1)

    rotary.recomposition_frequencies = chunked


@mistake
def positions_that_count_all_rows_of_an_image(reference: Qwen3VLReference) -> None:
    right = reference.positions

    def counting(tokens: list[int], grids: Any) -> torch.Tensor:
        found = right(tokens, grids)
        place = 0
        for _, high, wide in grids:
            start = tokens.index(reference.config["image_token_id"], place)
            place = start + high * wide // 4
            found[:, place:] += high * wide // 4 - max(high, wide) // 2
        return found

    reference.positions = counting


@mistake
def state_before_the_final_norm(reference: Qwen3VLReference) -> None:
    reference.model.language_model.norm = nn.Identity()


@mistake
def mean_pooling(reference: Qwen3VLReference) -> None:
    reference.pool = lambda hidden: hidden.mean(0)


@mistake
def attention_both_ways(reference: Qwen3VLReference) -> None:
    reference.causal = False


@mistake
def no_norm_of_queries_and_keys(reference: Qwen3VLReference) -> None:
    for layer in reference.model.language_model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()


@mistake
def no_end_token(reference: Qwen3VLReference) -> None:
    whole = reference.tokens
    reference.tokens = lambda *given: whole(*given)[:-1]


@mistake
def learned_positions_of_other_corners(reference: Qwen3VLReference) -> None:
    reference.model.visual.interpolation_align_corners = False


@mistake
def rows_and_columns_exchanged_in_the_vision_rotation(reference: Qwen3VLReference) -> None:
    rotary = reference.model.visual.rotary_pos_emb
    right = rotary.recomposition_frequencies
    rotary.recomposition_frequencies = lambda values: right(values.flip(1))


@mistake
def patches_row_by_row(reference: Qwen3VLReference) -> None:
    whole = reference.pixels

    def in_reading_order(data: bytes) -> tuple[torch.Tensor, Any]:
        pixels, grid = whole(data)
        _, high, wide = grid
        blocks = pixels.view(high // 2, wide // 2, 2, 2, -1).transpose(1, 2)
        return blocks.reshape(high * wide, -1), grid

    reference.pixels = in_reading_order


@mistake
def pixels_not_centred(reference: Qwen3VLReference) -> None:
    whole = reference.pixels

    def from_zero(data: bytes) -> tuple[torch.Tensor, Any]:
        pixels, grid = whole(data)
        return (pixels + 1) / 2, grid

    reference.pixels = from_zero


@pytest.fixture(scope="module")
def found(path: Path, model: Any) -> np.ndarray:
    return PARITY.found(model)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_fails_the_bar(name: str, path: Path, found: np.ndarray, record_property: Record) -> None:
    reference = Qwen3VLReference(path)
    MISTAKES[name](reference)
    bar = "float32" if name in TOO_FINE_FOR_BFLOAT16 else "bfloat16"
    PARITY.check_mistake(name, reference, found, record_property, bar=bar)


def test_no_mistake_passes_the_bar(path: Path, found: np.ndarray) -> None:
    right = PARITY.expected(Qwen3VLReference(path))
    assert cosines(found, right).min() >= BAR
