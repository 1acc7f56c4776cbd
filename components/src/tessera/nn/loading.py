"""Builds towers and fills them from weight files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from tessera.checkpoint.loading import fill, torch_dtype
from tessera.checkpoint.safetensors import StoredTensor
from tessera.nn.encoder import EncoderTower
from tessera.nn.forms.choice import form_for
from tessera.nn.forms.plain import Form
from tessera.nn.layer import SOURCES
from tessera.nn.spec import EncoderSpec, TextSpec, VocabularySpec
from tessera.nn.text import TextTower
from tessera.nn.vision import VisionTower
from tessera.nn.vocabulary import VocabularyWeights


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


def load_vision(
    make: Callable[[], VisionTower],
    tensors: Mapping[str, StoredTensor],
    *,
    part: str,
    normalisation: tuple[Sequence[float], Sequence[float]],
    dtype: str,
    device: str,
    form: Form | None = None,
) -> VisionTower:
    """The vision tower that ``make`` builds on ``device``, ready to run; raises ``CheckpointError``.

    ``normalisation`` is the mean and the deviation of each channel of pixels. ``form`` is chosen by device
    and type if it is not given.
    """
    at, kind = torch.device(device), torch_dtype(dtype)
    with torch.device("meta"):
        tower = make()
    fill(tower, tensors, part=part, sources=tower.sources, dtype=kind, device=at)
    tower.prepare(*normalisation, at, form_for(at, kind) if form is None else form)
    return tower.eval()


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
