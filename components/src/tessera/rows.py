"""The rows that inputs became: one type from the engine's answer to the client's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

# How far the square of a length may be from 1.
_TOLERANCE: Final = 0.01


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of several inputs, one input after the other.

    ``values`` is float32 ``[rows, width]``. ``bounds`` is int64 ``[inputs + 1]``: input ``i`` has the rows
    ``bounds[i]`` to ``bounds[i + 1]``. ``norms`` is float32 ``[rows]``: the length that a row had before the
    family scaled it to unit length, and 1 where rows are not scaled. ``indices``, for sparse rows alone, is
    int32 ``[rows, width]``: the vocabulary's id that each value belongs to.
    """

    values: npt.NDArray[np.float32]
    bounds: npt.NDArray[np.int64]
    norms: npt.NDArray[np.float32]
    indices: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        """Return how many inputs there are."""
        return len(self.bounds) - 1

    @property
    def width(self) -> int:
        return int(self.values.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of values, norms and indices."""
        return self.values.nbytes + self.norms.nbytes + (0 if self.indices is None else self.indices.nbytes)

    def places(self, inputs: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the indices of these inputs' rows, one input after the other."""
        at = np.fromiter(inputs, np.int64, len(inputs))
        first = self.bounds[at]
        counts = self.bounds[at + 1] - first
        ends = np.cumsum(counts)
        if not len(ends):
            return ends
        return np.repeat(first - (ends - counts), counts) + np.arange(ends[-1])

    def put(
        self, inputs: Sequence[int], values: npt.NDArray[np.float32], norms: npt.NDArray[np.float32]
    ) -> None:
        """Write the rows of these inputs, which come one input after the other."""
        places = self.places(inputs)
        self.values[places], self.norms[places] = values, norms

    def spread(self, inputs: Sequence[int], bounds: npt.NDArray[np.int64]) -> Rows:
        """Return these inputs' rows at their places among the inputs of ``bounds``, with zeros elsewhere."""
        count = int(bounds[-1])
        rows = Rows(np.zeros((count, self.width), np.float32), bounds, np.zeros(count, np.float32))
        rows.put(inputs, self.values, self.norms)
        return rows

    def of(self, index: int) -> Rows:
        """Return one input's rows; they are views of these."""
        return self._between(*self.bounds[index : index + 2].tolist())

    def __iter__(self) -> Iterator[Rows]:
        """Yield each input's rows on their own; they are views of these, and of a single input these."""
        if len(self) == 1:
            yield self
            return
        for first, last in pairwise(self.bounds.tolist()):
            yield self._between(first, last)

    def faulty(self, *, unit_length: bool) -> npt.NDArray[np.bool_] | None:
        """Return a mask ``[rows]`` of rows that are not finite or, with ``unit_length``, not of length 1.

        None where all rows are sound. The squares of a row longer than 1.8e19 overflow float32: scaled by
        that, it is zeros.
        """
        # Most requests have one row: 3.0 µs for 2,048 values, 8.5 by what follows, of some 600 in all.
        if len(self.values) == 1 and self._is_sound(unit_length):
            return None
        return self._mask(unit_length)

    def _mask(self, unit_length: bool) -> npt.NDArray[np.bool_] | None:
        sound: npt.NDArray[np.bool_]
        if unit_length:
            squares = np.einsum("ij,ij->i", self.values, self.values)
            sound = (np.abs(squares - 1) <= _TOLERANCE) & np.isfinite(self.norms)
        else:
            sound = np.asarray(np.isfinite(self.values).all(axis=1))
        return None if sound.all() else ~sound

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Return the inputs of at least one ``Rows`` of one width, in their order; a single one as it is."""
        return parts[0] if len(parts) == 1 else cls._concatenated(parts)

    @classmethod
    def _concatenated(cls, parts: Sequence[Rows]) -> Rows:
        counts = np.concatenate([np.diff(part.bounds) for part in parts])
        indices = [part.indices for part in parts if part.indices is not None]
        return cls(
            np.concatenate([part.values for part in parts]),
            np.concatenate(([0], np.cumsum(counts))).astype(np.int64, copy=False),
            np.concatenate([part.norms for part in parts]),
            np.concatenate(indices) if indices else None,
        )

    def _is_sound(self, unit_length: bool) -> bool:
        """Whether the only row is sound for certain; a square may overflow where the values are finite."""
        row = self.values[0]
        with np.errstate(over="ignore", invalid="ignore"):
            square = float(np.dot(row, row))
        if unit_length:
            return abs(square - 1) <= _TOLERANCE and math.isfinite(self.norms[0])
        return math.isfinite(square)

    def _between(self, first: int, last: int) -> Rows:
        indices = None if self.indices is None else self.indices[first:last]
        bounds = np.array((0, last - first), np.int64)
        return Rows(self.values[first:last], bounds, self.norms[first:last], indices)
