"""Llama Nemotron Embed VL: a SigLIP encoder, a pixel-shuffle projector and a bidirectional Llama.

Opening, prompts, tiling and preprocessing live in modules that never import torch; ``loading`` and what
it builds do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tessera.models.base import Family, Model
from tessera.models.llama_nemotron_vl.model import FAMILY_NAME, LlamaNemotronVL
from tessera.models.options import read_options

__all__ = ["FAMILY"]


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """This family has none."""


@dataclass(frozen=True, slots=True)
class _Family:
    name: str = FAMILY_NAME
    model_types: tuple[str, ...] = ("llama_nemotron_vl",)

    def open_model(self, path: Path, options: Mapping[str, object]) -> Model:
        read_options(options, _Options, family=self.name)
        return LlamaNemotronVL.open(path)


FAMILY: Family = _Family()  # type: ignore[assignment]
