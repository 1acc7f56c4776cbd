"""Describes the model that an engine runs."""

from __future__ import annotations

import msgspec

from tessera.models.base import OutputKind, ScoreActivation


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that inputs are embedded with.

    ``fingerprint`` is of weights, preprocessing and prompts. ``width`` is that of the vectors which come out,
    and ``dimensions`` are others that the model was trained for; ``checkpoint`` is ``random`` or ``demo`` for
    those that come with Tessera. ``activation`` is of scores.
    """

    name: str
    fingerprint: str
    kind: OutputKind
    width: int
    images: bool
    dimensions: tuple[int, ...] = ()
    checkpoint: str = ""
    activation: ScoreActivation = "sigmoid"
