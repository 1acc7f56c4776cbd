"""Llama Nemotron Embed: text alone, through a bidirectional Llama, to the mean of all states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tessera.models.base import Family, Model
from tessera.models.llama_nemotron_embed.model import FAMILY_NAME, LlamaNemotronEmbed, Options
from tessera.models.options import read_options

__all__ = ["FAMILY"]


@dataclass(frozen=True, slots=True)
class _Family:
    name: str = FAMILY_NAME
    model_types: tuple[str, ...] = ("llama_bidirec",)

    def open_model(self, path: Path, options: Mapping[str, object]) -> Model:
        return LlamaNemotronEmbed(path, read_options(options, Options, family=self.name))


FAMILY: Family = _Family()  # type: ignore[assignment]
