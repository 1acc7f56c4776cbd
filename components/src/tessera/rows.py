"""The rows that inputs became: one type from the engine's answer to the client's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt


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

    def split(self) -> list[Rows]:
        """Return each input's rows on their own; they are views of these."""
        return [self._between(first, last) for first, last in pairwise(self.bounds.tolist())]

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Return the inputs of at least one ``Rows`` of one width, in their order; a single one as it is."""
        if len(parts) == 1:
            return parts[0]
        counts = np.concatenate([np.diff(part.bounds) for part in parts])
        indices = [part.indices for part in parts if part.indices is not None]
        return cls(
            np.concatenate([part.values for part in parts]),
            np.concatenate(([0], np.cumsum(counts))).astype(np.int64, copy=False),
            np.concatenate([part.norms for part in parts]),
            np.concatenate(indices) if indices else None,
        )

    def _between(self, first: int, last: int) -> Rows:
        indices = None if self.indices is None else self.indices[first:last]
        bounds = np.array((0, last - first), np.int64)
        return Rows(self.values[first:last], bounds, self.norms[first:last], indices)
