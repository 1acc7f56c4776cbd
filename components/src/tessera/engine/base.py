"""What every engine offers: load and warm, run one batch, close; one protocol for vision, one for text.

One thread drives an engine. ``launch`` may return before the work is done; the ``result`` of what it returns
waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from tessera.engine.batch import Cost, TextBatch, TextVectors
from tessera.launched import Launched

if TYPE_CHECKING:
    import torch


class VisionEngine(Protocol):
    """Turns uint8 tiles into vision rows and writes them into tensors of the caller."""

    @property
    def cost(self) -> Cost: ...

    @property
    def depth(self) -> int:
        """Batches that may be launched and unfinished at a time."""
        ...

    def warm(self) -> None:
        """Run what is slow the first time; raises ``EngineFailed``."""
        ...

    def launch(self, tiles: Sequence[npt.NDArray[np.uint8]], out: Sequence[torch.Tensor]) -> Launched[object]:
        """Encode images, one entry of ``tiles`` and of ``out`` for each.

        An entry of ``tiles`` is ``[n, 3, height, width]``; its rows are written into the entry of ``out``,
        ``[n * tokens_per_tile, hidden]``, and are complete when the result is there.
        """
        ...

    def close(self) -> None: ...


class TextEngine(Protocol):
    """Turns packed sequences into pooled float32 vectors, L2-normalised, with their norms."""

    @property
    def cost(self) -> Cost: ...

    @property
    def depth(self) -> int: ...

    def warm(self) -> None: ...

    def launch(self, batch: TextBatch) -> Launched[TextVectors]:
        """Run a batch; the vectors come in its order."""
        ...

    def close(self) -> None: ...
