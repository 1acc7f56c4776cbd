"""The rows that inputs became: one type from the engine's answer to the client's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    family scaled it to unit length, and 1 where rows are not scaled. ``indices`` is int32 ``[rows]``: the
    token id that each row is of, -1 for a row that holds nothing, whose values are 0; None where all rows
    hold something and nobody asks. Sparse rows of an input have ascending ids, then those that hold nothing:
    so their number is known before the work. ``others`` are the rows of further outputs of the same inputs.
    """

    values: npt.NDArray[np.float32]
    bounds: npt.NDArray[np.int64]
    norms: npt.NDArray[np.float32]
    indices: npt.NDArray[np.int32] | None = None
    others: tuple[Rows, ...] = ()

    def __len__(self) -> int:
        """Return how many inputs there are."""
        return len(self.bounds) - 1

    @property
    def width(self) -> int:
        return int(self.values.shape[1])

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How many rows each input has, ``[inputs]``."""
        # np.diff takes 2.9 µs for one input, this 1.1.
        return self.bounds[1:] - self.bounds[:-1]

    @property
    def nbytes(self) -> int:
        """Bytes of values, norms and indices, of the others too."""
        own = self.values.nbytes + self.norms.nbytes + (0 if self.indices is None else self.indices.nbytes)
        return own + sum([rows.nbytes for rows in self.others])

    @classmethod
    def zeros(cls, bounds: npt.NDArray[np.int64], width: int) -> Rows:
        """Return rows of zeros, none of which holds anything."""
        count = int(bounds[-1])
        return cls(np.zeros((count, width), np.float32), bounds, np.zeros(count, np.float32))

    def copied(self) -> Rows:
        """Return the same in arrays of their own."""
        return Rows(
            self.values.copy(),
            self.bounds,
            self.norms.copy(),
            None if self.indices is None else self.indices.copy(),
            tuple([rows.copied() for rows in self.others]),
        )

    @classmethod
    def together(cls, outputs: Sequence[Rows]) -> Rows:
        """Return the rows of at least one output of the same inputs; ``each`` takes them apart."""
        first, *others = outputs
        return replace(first, others=tuple(others)) if others else first

    def each(self) -> tuple[Rows, ...]:
        """Return the rows of each output, the first one's without the others."""
        return (replace(self, others=()), *self.others) if self.others else (self,)

    def held(self) -> Rows:
        """Return the rows that hold something, with bounds of their own."""
        if self.indices is None:
            return self
        held = self.indices >= 0
        bounds = np.concatenate(([0], np.cumsum(held)))[self.bounds]
        return Rows(self.values[held], bounds, self.norms[held], self.indices[held])

    def places(self, inputs: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the indices of these inputs' rows, one input after the other."""
        at = np.fromiter(inputs, np.int64, len(inputs))
        first = self.bounds[at]
        counts = self.bounds[at + 1] - first
        ends = np.cumsum(counts)
        if not len(ends):
            return ends
        return np.repeat(first - (ends - counts), counts) + np.arange(ends[-1])

    def put(self, inputs: Sequence[int], rows: Rows) -> Rows:
        """Write the rows of these inputs, which come one input after the other; returns the whole.

        Indices are made where ``rows`` are the first to have them.
        """
        places = self.places(inputs)
        self.values[places], self.norms[places] = rows.values, rows.norms
        whole = self
        if rows.indices is not None:
            if self.indices is None:
                whole = replace(self, indices=np.full(len(self.values), -1, np.int32))
            assert whole.indices is not None
            whole.indices[places] = rows.indices
        if not self.others:
            return whole
        others = [mine.put(inputs, theirs) for mine, theirs in zip(self.others, rows.others, strict=True)]
        return replace(whole, others=tuple(others))

    def spread(self, inputs: Sequence[int], bounds: npt.NDArray[np.int64]) -> Rows:
        """Return these inputs' rows at their places among the inputs of ``bounds``, with zeros elsewhere."""
        return Rows.zeros(bounds, self.width).put(inputs, self)

    def of(self, index: int) -> Rows:
        """Return one input's rows; they are views of these."""
        rows = self._between(*self.bounds[index : index + 2].tolist())
        if not self.others:
            return rows
        return replace(rows, others=tuple([other.of(index) for other in self.others]))

    def __iter__(self) -> Iterator[Rows]:
        """Yield each input's rows on their own; they are views of these, and of a single input these."""
        if len(self) == 1:
            yield self
            return
        if self.others:
            yield from map(self.of, range(len(self)))
            return
        for first, last in pairwise(self.bounds.tolist()):
            yield self._between(first, last)

    def faulty(self, *, unit_length: bool) -> npt.NDArray[np.bool_] | None:
        """Return a mask ``[rows]`` of rows that are not finite or, with ``unit_length``, not of length 1.

        None where all rows are sound. The squares of a row longer than 1.8e19 overflow float32: scaled by
        that, it is zeros.
        """
        # Most requests have one row: 2 µs for 2,048 values, 9 by the other way. ``np.dot`` would warn of NaN.
        alone = unit_length and len(self.values) == 1 and math.isfinite(self.norms[0])
        if alone and abs(float(np.vdot(self.values, self.values)) - 1) <= _TOLERANCE:
            return None
        return self._faulty(unit_length=unit_length)

    def _faulty(self, *, unit_length: bool) -> npt.NDArray[np.bool_] | None:
        sound: npt.NDArray[np.bool_]
        if unit_length:
            squares = np.einsum("ij,ij->i", self.values, self.values)
            sound = (np.abs(squares - 1) <= _TOLERANCE) & np.isfinite(self.norms)
            if self.indices is not None:
                sound |= (self.indices < 0) & (squares == 0)
        else:
            sound = np.asarray(np.isfinite(self.values).all(axis=1))
        return None if sound.all() else ~sound

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Return the inputs of at least one ``Rows`` of one width, in their order; a single one as it is."""
        return parts[0] if len(parts) == 1 else cls._concatenated(parts)

    @classmethod
    def _concatenated(cls, parts: Sequence[Rows]) -> Rows:
        counts = np.concatenate([part.counts for part in parts])
        indices = [part.indices for part in parts if part.indices is not None]
        return cls(
            np.concatenate([part.values for part in parts]),
            np.concatenate(([0], np.cumsum(counts))).astype(np.int64, copy=False),
            np.concatenate([part.norms for part in parts]),
            np.concatenate(indices) if indices else None,
            tuple(map(cls.joined, zip(*[part.others for part in parts], strict=True))),
        )

    def _between(self, first: int, last: int) -> Rows:
        indices = None if self.indices is None else self.indices[first:last]
        bounds = np.array((0, last - first), np.int64)
        return Rows(self.values[first:last], bounds, self.norms[first:last], indices)
