"""What every engine offers: load and warm, run one batch, close; one protocol for vision, one for text.

One thread drives an engine. ``launch`` may return before the work is done; the ``result`` of what it returns
waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from tessera.engine.batch import Cost, TextBatch, VisionBatch
from tessera.errors import ConfigError
from tessera.launched import Launched
from tessera.models.base import Model, VisionSpec
from tessera.rows import Rows

if TYPE_CHECKING:
    import torch


def vision_of(model: Model) -> VisionSpec:
    """The vision stage of a model; raises ``ConfigError`` naming a family that has none."""
    if model.vision is None:
        raise ConfigError(f"family {model.family} reads text alone: it has no vision stage")
    return model.vision


class VisionEngine(Protocol):
    """Turns pixels into vision rows and writes them into tensors of the caller."""

    @property
    def cost(self) -> Cost: ...

    @property
    def depth(self) -> int:
        """Batches that may be launched and unfinished at a time."""
        ...

    @property
    def takes_floats(self) -> bool:
        """Whether it takes float32 pixels, which a client normalised itself, beside uint8 ones."""
        ...

    def warm(self) -> None:
        """Run what is slow the first time; raises ``EngineFailed``."""
        ...

    def launch(self, batch: VisionBatch, out: Sequence[torch.Tensor]) -> Launched[object]:
        """Encode images; ``out`` has an entry ``[rows, row_width]`` for each of them.

        The rows of an image are written into its entry, and are complete when the result is there.
        """
        ...

    def close(self) -> None: ...


class TextEngine(Protocol):
    """Turns packed sequences into float32 output rows, with the norms that they had."""

    @property
    def cost(self) -> Cost: ...

    @property
    def depth(self) -> int: ...

    def warm(self) -> None: ...

    @property
    def gives(self) -> Collection[str]:
        """The names of the outputs that sequences may ask for beside the default."""
        ...

    def launch(self, batch: TextBatch) -> Launched[Rows]:
        """Run a batch whose sequences all ask for the default output; the rows come in its order."""
        ...

    def launch_named(self, batch: TextBatch) -> Launched[list[Rows]]:
        """Run a batch with names of outputs, in one pass; what each sequence asks for, in its order.

        Raises ``EngineFailed`` for a name that is not one that it gives.
        """
        ...

    def close(self) -> None: ...
