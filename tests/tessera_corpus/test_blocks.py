"""What Ray's stages hand on is the same on the other side."""

from __future__ import annotations

import numpy as np
import pytest

from tessera_corpus.item import Embedded
from tessera_corpus.ray.blocks import block_of, rows_of
from tests.tessera_corpus.output.made import embedded, three


@pytest.mark.parametrize(
    "item", [embedded("a", "x", rows=3), three("b", "some text"), three("c", "")], ids=lambda item: item.id
)
def test_the_rows_of_all_outputs_arrive(item: Embedded) -> None:
    (found,) = rows_of(block_of([item]))
    assert isinstance(found, Embedded)
    assert (found.id, found.source, found.tokens) == (item.id, item.source, item.tokens)
    for own, its in zip(item.rows.each(), found.rows.each(), strict=True):
        assert np.array_equal(own.values, its.values) and np.array_equal(own.bounds, its.bounds)
        assert (own.indices is None) == (its.indices is None)
        assert own.indices is None or np.array_equal(own.indices, its.indices)  # type: ignore[arg-type]
