"""Describes the model that an engine runs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tessera.models.base import OutputKind, ScoreActivation, outputs_named


class OutputInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An output of a model: its name, what comes out for one input, and the width of its rows."""

    name: str
    kind: OutputKind
    width: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that inputs are embedded with.

    ``fingerprint`` is of weights, preprocessing and prompts. ``outputs`` are all that it gives, the default
    first, whose width is that of the vectors which come out, and ``dimensions`` are others that the model was
    trained for; ``checkpoint`` is ``random`` or ``demo`` for those that come with Tessera. ``activation`` is
    of scores.
    """

    name: str
    fingerprint: str
    outputs: tuple[OutputInfo, ...]
    images: bool
    dimensions: tuple[int, ...] = ()
    checkpoint: str = ""
    activation: ScoreActivation = "sigmoid"

    @property
    def kind(self) -> OutputKind:
        """The default output's."""
        return self.outputs[0].kind

    @property
    def width(self) -> int:
        """The default output's."""
        return self.outputs[0].width

    def of_width(self, width: int) -> ModelInfo:
        """Return the same with vectors of another width."""
        first, *others = self.outputs
        return msgspec.structs.replace(self, outputs=(msgspec.structs.replace(first, width=width), *others))

    def asked(self, names: Sequence[str], param: str) -> tuple[OutputInfo, ...]:
        """Return the outputs of these names, each once, without any the default.

        Raises ``InvalidInput`` for ``param``, naming what the model has.
        """
        return outputs_named(self.name, self.outputs, tuple(dict.fromkeys(names)), param)
