"""Logits of pairs, from the references of the embedding models and a linear head: one pair at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file

from tests.references.llama_nemotron_embed import LlamaReference
from tests.references.llama_nemotron_vl import Reference

if TYPE_CHECKING:
    from tests.models.running import Given, Pair

TEMPLATE = "question:{query} \n \n passage:{document}"


class Score:
    """The head of the checkpoint at ``path``, in float32."""

    def __init__(self, path: Path) -> None:
        self.weight = load_file(path / "model.safetensors")["score.weight"].float()
        self.temperature = json.loads((path / "config.json").read_text())["temperature"]

    def __call__(self, pooled: torch.Tensor) -> np.ndarray:
        return (self.weight @ pooled / self.temperature).numpy()


class RerankReference(LlamaReference):
    """Llama Nemotron Rerank."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.score = Score(Path(path))
        self.template = TEMPLATE

    def pair_tokens(self, query: str, document: str) -> list[int]:
        return self.tokens(self.template.format(query=query, document=document), "none")

    def answer(self, pair: Pair) -> np.ndarray:  # type: ignore[override]
        """The logit, float32 ``[1]``."""
        return self.score(self.pool(self.hidden(self.pair_tokens(text(pair.query), text(pair.document)))))


class RerankVLReference(Reference):
    """Llama Nemotron Rerank VL."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.score = Score(Path(path))
        self.template = TEMPLATE

    def pair_tokens(self, query: str, document: str, tiles: list[int]) -> list[int]:
        return self.tokens(self.template.format(query=query, document=document), tiles, "none")

    def answer(self, pair: Pair) -> np.ndarray:
        """The logit, float32 ``[1]``."""
        tiles = [self.tiles(image) for image in pair.images]
        tokens = self.pair_tokens(text(pair.query), text(pair.document), [len(cut) for cut in tiles])
        rows = [self.vision_rows(cut) for cut in tiles]
        return self.score(self.pooled(self.last_hidden(self.fused(tokens, rows))))


def text(given: Given) -> str:
    return "".join(part for part in given.parts if isinstance(part, str))
