"""What Nemotron ColEmbed VL v2 computes, from transformers' own modules; shares no code with Tessera."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.references.qwen3 import Qwen3VLReference

if TYPE_CHECKING:
    from tests.models.running import Given


class NemotronColEmbedReference(Qwen3VLReference):
    """The checkpoint at ``path``, in float32: attention both ways, states before the final norm."""

    limits = (4096, 1_310_720)

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer

        super().__init__(path)
        self.renderer = AutoTokenizer.from_pretrained(path)
        self.causal = False
        self.norm, self.model.language_model.norm = self.model.language_model.norm, nn.Identity()

    def body(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert weights.pop("lm_head.weight").shape
        return super().body(weights)

    def prompt(self, given: Given, grids: list[tuple[int, int, int]]) -> list[int]:
        """Ids as the published processor makes them: of a turn, with the placeholders of each image."""
        text = "".join(part for part in given.parts if isinstance(part, str))
        prefix = {"query": "Query: query: ", "passage": "passage: ", "none": ""}[given.role.value]
        content = [{"type": "image"} for _ in grids] + [{"type": "text", "text": prefix + text}]
        rendered = self.renderer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        for _, high, wide in grids:
            rendered = rendered.replace("<|image_pad|>", "<|placeholder|>" * (high * wide // 4), 1)
        return list(self.renderer(rendered.replace("<|placeholder|>", "<|image_pad|>")).input_ids)

    @torch.no_grad()
    def answer(self, given: Given) -> np.ndarray:
        """A unit vector of each token, float32 ``[tokens, width]``."""
        images = [self.pixels(part) for part in given.parts if isinstance(part, bytes)]
        grids = [grid for _, grid in images]
        rows = [self.vision_rows(*image) for image in images]
        hidden = self.hidden(self.prompt(given, grids), grids, rows)
        return functional.normalize(hidden, dim=-1, eps=1e-12).numpy()
