"""Qwen3-Embedding: text alone, through a causal decoder, to the state of the last token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tessera.models.base import Family, Model
from tessera.models.options import read_options
from tessera.models.qwen3_embedding.model import FAMILY_NAME, Options, Qwen3Embedding

__all__ = ["FAMILY"]


@dataclass(frozen=True, slots=True)
class _Family:
    name: str = FAMILY_NAME
    model_types: tuple[str, ...] = ("qwen3",)

    def open_model(self, path: Path, options: Mapping[str, object]) -> Model:
        return Qwen3Embedding.open(path, read_options(options, Options, family=self.name))


FAMILY: Family = _Family()  # type: ignore[assignment]
