"""Rows of a batch are handed out as plain copies would leave them; a card's test is in tests/gpu."""

from __future__ import annotations

import pytest

from tessera.engine.placement import Placement
from tests.engine.handing_out import TARGETS, HandingOut


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", TARGETS)
def test_each_image_gets_its_own(kind: str, dtype: str) -> None:
    given = HandingOut(kind, Placement(device="cpu", dtype=dtype), 0)
    given.start(given.rows)
    given.check()
