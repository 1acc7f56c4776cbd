"""The Engine seam: load and warm, run one batch, close; one protocol for vision, one for text.

An engine is driven by one thread. ``launch`` may return before the work is done; ``result`` waits for
it. A launched batch keeps its inputs alive until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from tessera.engine.launched import Launched

if TYPE_CHECKING:
    import torch

_EPSILON = np.float32(1e-12)

Cost = Callable[[int, int, int], int]
"""(sequences, their sizes' sum, the largest size) → what the batch costs, in tokens or tiles."""


def packed_cost(count: int, total: int, longest: int) -> int:
    """Nothing is padded: a batch costs the sum of its sizes."""
    return total


def padded_cost(count: int, total: int, longest: int) -> int:
    """Every sequence is padded to the longest."""
    return count * longest


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBatch:
    """Sequences packed without padding. Index arrays are int32 on the host.

    ``vision`` holds one tensor ``[rows, hidden]`` for each image, on host or device, in the order in which
    ``vision_index`` lists their packed positions.
    """

    input_ids: npt.NDArray[np.int32]  # [total]
    positions: npt.NDArray[np.int32]  # [total]
    cu_seqlens: npt.NDArray[np.int32]  # [batch + 1]
    lengths: tuple[int, ...]  # [batch]
    vision: tuple[torch.Tensor, ...]
    vision_index: npt.NDArray[np.int32]  # [sum of the rows of vision]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextVectors:
    """What a text batch gives: float32 unit ``vectors`` ``[batch, hidden]`` and what their lengths were.

    ``norms`` is float32 ``[batch]``; a vector times its norm is what the model pooled.
    """

    vectors: npt.NDArray[np.float32]
    norms: npt.NDArray[np.float32]

    @classmethod
    def of(cls, pooled: npt.NDArray[np.float32]) -> TextVectors:
        """From pooled float32 ``[batch, hidden]``; a row shorter than 1e-12 is only divided by that."""
        norms = np.sqrt(np.einsum("ij,ij->i", pooled, pooled))
        return cls(vectors=pooled / np.maximum(norms, _EPSILON)[:, None], norms=norms)

    def rows(self) -> list[tuple[npt.NDArray[np.float32], float]]:
        """Each sequence's vector with its norm."""
        return list(zip(self.vectors, self.norms.tolist(), strict=True))


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
