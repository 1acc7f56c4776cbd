"""The vectors that are carried to other machines are those that transformers computes today."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.carrying import assert_carried
from tests.models.pinned import assert_pinned
from tests.models.running import cosines, error
from tests.references.carry import ALL

NAMES = [name for name, each in ALL.items() if not each.full_size]


@pytest.mark.parity
@pytest.mark.parametrize("name", NAMES)
def test_carried_vectors(name: str, tmp_path: Path) -> None:
    computed, carried = ALL[name].compute(tmp_path), ALL[name].vectors()
    assert computed.shape == carried.shape
    if carried.shape[1] == 1:
        assert error(computed, carried) <= 1e-4
    else:
        assert cosines(computed, carried).min() >= 0.99999


@pytest.mark.parametrize("name", NAMES)
def test_the_modules_give_them(name: str, tmp_path: Path) -> None:
    """What a card's tests do runs here as well: those are run seldom."""
    model, found = assert_carried(ALL[name], tmp_path, dtype="float32", device="cpu")
    assert_pinned(model, name, found)
