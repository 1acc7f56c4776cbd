"""What each stage of a Qwen3-VL body gives for a batch, beside what transformers' own modules do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tessera_tools.random_checkpoint.qwen3 import Qwen3VLSpec
from tests.models.running import Given, Pair, batch_of, cosines, preprocessed, vision_rows
from tests.references.qwen3 import Qwen3VLReference

Stages = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Ours and the reference's rows, by the stage."""


def as_the_largest(spec: Any) -> Any:
    """A small checkpoint with what sets the 8B apart: vision heads of 72, text heads of 128, other levels."""
    assert isinstance(spec, Qwen3VLSpec)
    return replace(
        spec,
        hidden=192,
        head_dim=128,
        heads=2,
        kv_heads=1,
        sections=(24, 20, 20),
        layers=3,
        vision_hidden=144,
        vision_heads=2,
        vision_intermediate=430,
        vision_layers=5,
        deepstack=(1, 2, 4),
        positions=2304,
        shards=2,
    )


@torch.no_grad()
def stages(model: Any, reference: Qwen3VLReference, inputs: Sequence[Given | Pair]) -> Stages:
    """Vision rows by their parts, and the last hidden state; checks that positions are equal."""
    vision = model.load_vision(dtype="float32", device="cpu")
    text = model.load_text(dtype="float32", device="cpu")
    pixels = preprocessed(model, inputs)
    rows = dict(zip(pixels, vision_rows(model, vision, list(pixels.values())), strict=True))
    expected_rows = {file: reference.vision_rows(*reference.pixels(file)) for file in pixels}
    width = model.text.layer.hidden
    assert model.vision.row_width == width * (1 + len(model.config.vision.deepstack))
    found = {
        f"vision rows, part {part}": (
            torch.cat([rows[file].split(width, 1)[part] for file in pixels]),
            torch.cat([expected_rows[file].split(width, 1)[part] for file in pixels]),
        )
        for part in range(model.vision.row_width // width)
    }
    batch = batch_of(model, vision, inputs)
    embedded = text.embed(
        torch.from_numpy(batch.input_ids), torch.cat(batch.vision), torch.from_numpy(batch.vision_index)
    )
    sequences = text.form.packed(torch.from_numpy(batch.cu_seqlens), batch.lengths)
    hidden = text.encode(embedded, torch.from_numpy(batch.positions), sequences)
    states = []
    for each, start, stop in zip(inputs, batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        tokens = batch.input_ids[start:stop].tolist()
        grids = [pixels[file].plan.grid for file in each.images]
        assert np.array_equal(batch.positions[:, start:stop], reference.positions(tokens, grids).numpy())
        states.append(reference.hidden(tokens, grids, [expected_rows[file] for file in each.images]))
    return found | {"last hidden state": (hidden, torch.cat(states))}


def check(name: str, title: str, found: Stages, bar: float, record: Any) -> None:
    """Check the worst row of each stage against the bar."""
    for stage, (ours, theirs) in found.items():
        worst = cosines(ours.numpy(), theirs.numpy()).min()
        line = f"{name:26}{stage:22}worst cosine {worst:.7f} of {len(ours)}"
        record(f"parity of {title} with transformers in float32: worst row", line)
        assert worst >= bar, line
