"""Builds towers and fills them from weight files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from tessera.checkpoint.loading import fill, torch_dtype
from tessera.checkpoint.safetensors import StoredTensor
from tessera.nn.forms.plain import Form
from tessera.nn.spec import TextSpec
from tessera.nn.text import TextTower

SOURCES: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What is stored apart and is one product here."""


def load_text(
    spec: TextSpec,
    tensors: Mapping[str, StoredTensor],
    *,
    part: str,
    dtype: str,
    device: str,
    form: Form | None = None,
) -> TextTower:
    """A text tower on ``device``, ready to run; ``tensors`` are those of ``spec.shapes(part)``.

    ``form`` is chosen by device and type if it is not given. Raises ``CheckpointError`` for a file that ends
    too early, ``ConfigError`` for a type that modules are not loaded in.
    """
    at = torch.device(device)
    with torch.device("meta"):
        tower = TextTower(spec)
    fill(tower, tensors, part=part, sources=SOURCES, dtype=torch_dtype(dtype), device=at)
    return tower.prepare(at, form)
