"""What a call's items became, as columns: an engine makes them so, and so they go from process to process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera.corpus.item import Embedded, Failure, Item


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """``rows``, float32 ``[sum(counts), width]``, of all items in their order; rows and tokens of each.

    ``reasons`` says why an item, by its place, has no rows.
    """

    rows: npt.NDArray[np.float32]
    counts: Sequence[int]
    tokens: Sequence[int]
    reasons: Mapping[int, str]

    def of(self, items: Sequence[Item]) -> list[Embedded | Failure]:
        """Each of the items with what it became."""
        found: list[Embedded | Failure] = []
        first = 0
        for place, (item, count, tokens) in enumerate(zip(items, self.counts, self.tokens, strict=True)):
            if (reason := self.reasons.get(place)) is not None:
                found.append(item.failed(reason))
            else:
                found.append(item.embedded(self.rows[first : first + count], tokens))
            first += count
        return found
