"""Holds the vectors of several inputs as columns: so an engine makes them, and so they cross processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

import numpy as np
import numpy.typing as npt

from tessera.errors import TesseraError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vectors:
    """The vectors of inputs, in their order.

    ``rows`` is float32 ``[sum(counts), width]``; ``counts`` and ``tokens`` are each input's.
    ``errors`` says why an input, by its place, has no rows.
    """

    rows: npt.NDArray[np.float32]
    counts: Sequence[int]
    tokens: Sequence[int]
    errors: Mapping[int, TesseraError]

    def __len__(self) -> int:
        """Return how many inputs there are."""
        return len(self.counts)

    def __iter__(self) -> Iterator[npt.NDArray[np.float32]]:
        """Yield each input's rows, none for one that failed; they are views of these."""
        for first, last in pairwise(accumulate(self.counts, initial=0)):
            yield self.rows[first:last]

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the inputs of all parts, in their order; there is at least one, and all have one width."""
        starts = accumulate(map(len, parts), initial=0)
        return cls(
            rows=np.concatenate([part.rows for part in parts]),
            counts=[count for part in parts for count in part.counts],
            tokens=[tokens for part in parts for tokens in part.tokens],
            errors={
                start + place: error
                for start, part in zip(starts, parts, strict=False)
                for place, error in part.errors.items()
            },
        )

    @classmethod
    def failed(cls, error: TesseraError, width: int) -> Self:
        """Return one input without rows."""
        return cls(rows=np.empty((0, width), np.float32), counts=[0], tokens=[0], errors={0: error})
