"""A batch of the text stage: sequences packed end to end on the host, and the vectors that are its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


_EPSILON = np.float32(1e-12)


Cost = Callable[[int, int, int], int]
"""What a batch costs, in tokens or tiles: from its number of entries, their total size, the largest size."""


def packed_cost(count: int, total: int, longest: int) -> int:
    """Cost where nothing is padded: the sum of the sizes."""
    return total


def padded_cost(count: int, total: int, longest: int) -> int:
    """Cost where every sequence is padded to the longest."""
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
    """The result of a text batch: float32 unit ``vectors`` ``[batch, hidden]`` and ``norms`` ``[batch]``.

    A vector times its norm is what the model pooled.
    """

    vectors: npt.NDArray[np.float32]
    norms: npt.NDArray[np.float32]

    @classmethod
    def of(cls, pooled: npt.NDArray[np.float32]) -> TextVectors:
        """Scale pooled float32 ``[batch, hidden]``; a row shorter than 1e-12 is divided by 1e-12."""
        norms = np.sqrt(np.einsum("ij,ij->i", pooled, pooled))
        return cls(vectors=pooled / np.maximum(norms, _EPSILON)[:, None], norms=norms)

    def by_sequence(self) -> list[tuple[npt.NDArray[np.float32], float]]:
        """Each sequence's vector with its norm."""
        return list(zip(self.vectors, self.norms.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInput:
    """One input: ``tokens`` int32 ``[n]``; ``vision_index`` int32, the positions of its vision rows in it."""

    tokens: npt.NDArray[np.int32]
    vision: tuple[torch.Tensor, ...] = ()
    vision_index: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))


def pack(sequences: Sequence[PackedInput]) -> TextBatch:
    """Pack at least one sequence into a batch, in their order."""
    lengths = np.fromiter((len(sequence.tokens) for sequence in sequences), np.int32, len(sequences))
    bounds = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    positions = np.arange(bounds[-1], dtype=np.int32) - np.repeat(bounds[:-1], lengths)
    with_vision = [
        (sequence.vision_index + start, sequence.vision)
        for sequence, start in zip(sequences, bounds[:-1], strict=True)
        if sequence.vision
    ]
    return TextBatch(
        input_ids=np.concatenate([sequence.tokens for sequence in sequences]),
        positions=positions,
        cu_seqlens=bounds,
        lengths=tuple(lengths.tolist()),
        vision=tuple(rows for _, vision in with_vision for rows in vision),
        vision_index=(
            np.concatenate([index for index, _ in with_vision]) if with_vision else np.empty(0, np.int32)
        ),
    )


def zeros(total: int, length: int) -> TextBatch:
    """A batch to warm up with: ``total`` tokens of id 0, in sequences of ``length`` but the last one."""
    lengths = [length] * (total // length) + [total % length] * (total % length > 0)
    return pack([PackedInput(tokens=np.zeros(length, np.int32)) for length in lengths])


def split(batch: TextBatch, count: int) -> list[TextBatch]:
    """Divide a batch into at most ``count`` of about as many tokens each, in order, at ends of sequences."""
    bounds = batch.cu_seqlens
    wanted = np.arange(count + 1) * (bounds[-1] / count)
    after = np.clip(np.searchsorted(bounds, wanted), 1, len(bounds) - 1)
    nearest = np.where(wanted - bounds[after - 1] < bounds[after] - wanted, after - 1, after)
    cuts = np.unique(nearest).tolist()
    # Vision rows come in the order of their positions, so each piece has consecutive rows of whole images.
    rows = np.searchsorted(batch.vision_index, bounds[cuts])
    ends = np.cumsum([0, *(len(image) for image in batch.vision)])
    images = np.searchsorted(ends, rows)
    return [
        TextBatch(
            input_ids=batch.input_ids[bounds[first] : bounds[last]],
            positions=batch.positions[bounds[first] : bounds[last]],
            cu_seqlens=bounds[first : last + 1] - bounds[first],
            lengths=batch.lengths[first:last],
            vision=batch.vision[images[piece] : images[piece + 1]],
            vision_index=batch.vision_index[rows[piece] : rows[piece + 1]] - bounds[first],
        )
        for piece, (first, last) in enumerate(pairwise(cuts))
    ]
