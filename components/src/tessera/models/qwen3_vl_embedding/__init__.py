"""Qwen3-VL-Embedding: images of any size and texts in any order, to the state of the last token.

Opening, prompts, resizing and preprocessing live in modules that never import torch; ``loading`` and what
it builds do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tessera.models.base import Family, Model
from tessera.models.options import read_options
from tessera.models.qwen3_vl_embedding.model import FAMILY_NAME, Options, Qwen3VLEmbedding

__all__ = ["FAMILY"]


@dataclass(frozen=True, slots=True)
class _Family:
    name: str = FAMILY_NAME
    model_types: tuple[str, ...] = ("qwen3_vl",)

    def open_model(self, path: Path, options: Mapping[str, object]) -> Model:
        return Qwen3VLEmbedding.open(path, read_options(options, Options, family=self.name))


FAMILY: Family = _Family()  # type: ignore[assignment]
