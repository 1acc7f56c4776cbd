"""Stages of a model as modules of plain tensors, for compilers and exporters.

A family that offers them implements ``StageFamily`` beside ``Model``. Their forward passes have no branch
that looks at values, nothing whose shape depends on data, and sizes that ``torch.export`` can leave open.

Stages are named ``vision``, ``text``, ``embed``, ``lm`` and ``post``, layouts ``padded`` and
``packed``; ``text`` alone comes in both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from tessera.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

Axis = int | str
"""A size, or the name of one that the batch decides: units, sequences, tokens or rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTensor:
    """One input or output; ``dtype`` is torch's name of it."""

    name: str
    dtype: str
    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModule:
    """A module in evaluation mode, and its positional inputs and outputs in order.

    ``fused_attention`` is false where attention builds its whole matrix of scores.
    """

    module: nn.Module
    inputs: tuple[StageTensor, ...]
    outputs: tuple[StageTensor, ...]
    fused_attention: bool = True


@runtime_checkable
class StageFamily(Protocol):
    """A model whose stages can be taken apart."""

    @property
    def image_token_id(self) -> int:
        """The placeholder that stands for a vision row among the tokens."""
        ...

    def load_stage(
        self, stage: str, *, layout: str, dtype: str, device: str, max_sequences: int = 1024
    ) -> StageModule:
        """Build the stage and read its weights, and no others.

        A packed batch on CUDA may hold up to ``max_sequences``.

        Raises ``CheckpointError`` as the loaders do, and ``ConfigError`` for a stage or layout that there
        is not.
        """
        ...


def check_stage(stage: str, layout: str, stages: Collection[str]) -> None:
    """Raises ``ConfigError`` for a stage that is none of ``stages``, or a layout that it has not."""
    if layout not in ("padded", "packed"):
        raise ConfigError(f"layout {layout!r} is none of padded, packed")
    if stage not in stages:
        raise ConfigError(f"stage {stage!r} is none of {', '.join(stages)}")
    if layout == "packed" and stage not in ("text", "vision"):
        raise ConfigError(f"stage {stage!r} has no packed layout; text and vision have")
