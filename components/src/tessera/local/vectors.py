"""Holds the vectors of several inputs: so an engine makes them, and so they cross processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np

from tessera.errors import TesseraError
from tessera.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vectors:
    """The vectors of inputs, in their order.

    ``rows`` are those of the first output that was asked for, its ``others`` those of the others.
    ``tokens`` are each input's. ``errors`` says why an input, by its place, has no rows.
    """

    rows: Rows
    tokens: Sequence[int]
    errors: Mapping[int, TesseraError]

    def __len__(self) -> int:
        """Return how many inputs there are."""
        return len(self.rows)

    def __iter__(self) -> Iterator[Rows]:
        """Yield each input's rows, none for one that failed; they are views of these."""
        return iter(self.rows)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the inputs of all parts, in their order; there is at least one, all of the same outputs."""
        starts = accumulate(map(len, parts), initial=0)
        return cls(
            rows=Rows.joined([part.rows for part in parts]),
            tokens=[tokens for part in parts for tokens in part.tokens],
            errors={
                start + place: error
                for start, part in zip(starts, parts, strict=False)
                for place, error in part.errors.items()
            },
        )

    @classmethod
    def failed(cls, errors: Sequence[TesseraError], widths: Sequence[int]) -> Self:
        """Return inputs without rows; ``widths`` are those of the outputs."""
        return cls(
            rows=no_rows(len(errors), widths), tokens=[0] * len(errors), errors=dict(enumerate(errors))
        )


def no_rows(inputs: int, widths: Sequence[int]) -> Rows:
    """Return so many inputs without rows; ``widths`` are those of the outputs."""
    return Rows.together([Rows.zeros(np.zeros(inputs + 1, np.int64), width) for width in widths])
