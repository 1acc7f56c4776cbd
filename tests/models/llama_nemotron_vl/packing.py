"""Runs modules over packed batches, as an engine would."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tessera.models.base import (
    Content,
    ImagePlan,
    Prompt,
    Role,
    TextTensors,
    Truncate,
    VisionModule,
    sequential,
)
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL


def pack(model: LlamaNemotronVL, prompts: Sequence[Prompt], rows: Sequence[torch.Tensor]) -> TextTensors:
    tokens = np.concatenate([prompt.tokens for prompt in prompts])
    lengths = [len(prompt.tokens) for prompt in prompts]
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    positions = np.concatenate([sequential(length) for length in lengths], axis=1)
    joined = (
        torch.cat([part.reshape(-1, model.vision.row_width) for part in rows])
        if rows
        else torch.empty(0, model.vision.row_width)
    )
    return TextTensors(
        input_ids=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(bounds),
        lengths=lengths,
        vision_rows=joined,
        vision_index=torch.from_numpy(model.vision_index(tokens)),
    )


def encode(module: VisionModule, tiles: torch.Tensor) -> torch.Tensor:
    """The vision rows of tiles, each an image of its own, packed."""
    count = len(tiles)
    bounds = torch.arange(count + 1, dtype=torch.int32)
    return module(tiles, torch.zeros(0, count, dtype=torch.int32), bounds, [1] * count)


def prompt(
    model: LlamaNemotronVL,
    text: str | Sequence[int],
    tiles: Sequence[int] = (),
    *,
    role: Role = Role.PASSAGE,
    max_tokens: int = 100_000,
    truncate: Truncate = Truncate.NONE,
) -> Prompt:
    per_tile = model.config.tokens_per_tile
    images = [ImagePlan(units=count, rows=count * per_tile) for count in tiles]
    part = text if isinstance(text, str) else np.array(text, np.int64)
    content = Content(parts=(part, *images) if len(part) or not images else tuple(images), role=role)
    return model.prompt(content, max_tokens=max_tokens, truncate=truncate, param="input[3]")
