"""The Engine seam: load and warm, run one batch, close; one protocol for vision, one for text.

An engine is driven by one thread. ``launch`` may return before the work is done; ``result`` waits for
it. A launched batch keeps its inputs alive until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from tessera.engine.batch import TextBatch, TextVectors
from tessera.launched import Launched

if TYPE_CHECKING:
    import torch

Cost = Callable[[int, int, int], int]
"""(sequences, their sizes' sum, the largest size) → what the batch costs, in tokens or tiles."""


def packed_cost(count: int, total: int, longest: int) -> int:
    """Nothing is padded: a batch costs the sum of its sizes."""
    return total


def padded_cost(count: int, total: int, longest: int) -> int:
    """Every sequence is padded to the longest."""
    return count * longest


class VisionEngine(Protocol):
    """uint8 tiles → vision rows, written where the caller wants them."""

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
        """Encode images.

        Each of ``tiles`` is ``[n, 3, height, width]`` and the ``out`` beside it is
        ``[n * tokens_per_tile, hidden]``.
        """
        ...

    def close(self) -> None: ...


class TextEngine(Protocol):
    """Packed sequences → pooled float32 vectors, L2-normalised, with their norms."""

    @property
    def cost(self) -> Cost: ...

    @property
    def depth(self) -> int: ...

    def warm(self) -> None: ...

    def launch(self, batch: TextBatch) -> Launched[TextVectors]:
        """Rows in the order of the batch."""
        ...

    def close(self) -> None: ...
