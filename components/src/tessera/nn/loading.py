"""Builds towers and fills them from weight files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from tessera.checkpoint.loading import fill, torch_dtype
from tessera.checkpoint.safetensors import StoredTensor
from tessera.nn.encoder import EncoderTower
from tessera.nn.forms.choice import form_for
from tessera.nn.forms.plain import Form
from tessera.nn.spec import EncoderSpec, TextSpec, VocabularySpec
from tessera.nn.text import TextTower
from tessera.nn.vocabulary import VocabularyWeights

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
    too early, ``ConfigError`` for a type that modules are not loaded in and, before anything is
    read, for layers that the form cannot run.
    """
    at, kind = torch.device(device), torch_dtype(dtype)
    chosen = form_for(at, kind) if form is None else form
    chosen.require(spec.layer)
    with torch.device("meta"):
        tower = EncoderTower(spec) if isinstance(spec, EncoderSpec) else TextTower(spec)
    fill(tower, tensors, part=part, sources=SOURCES, dtype=kind, device=at)
    return tower.prepare(at, chosen)


def load_vocabulary(
    tower: TextTower,
    spec: VocabularySpec,
    tensors: Mapping[str, StoredTensor],
    *,
    part: str,
    dtype: str,
    name: str,
) -> TextTower:
    """Give a tower a head over its vocabulary, which is its default output, and return the tower.

    ``tensors`` are those of ``spec.shapes(part)``, and ``name`` is the output's. Raises ``CheckpointError``.
    """
    table = tower.embed_tokens.weight
    with torch.device("meta"):
        head = VocabularyWeights(spec)
    fill(head, tensors, part=part, sources={}, dtype=torch_dtype(dtype), device=table.device)
    head.tie(table)
    return tower.give(name, {name: head.eval()})
