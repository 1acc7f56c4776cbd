"""The vectors that are carried to other machines are those that transformers computes today."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.running import cosines
from tests.references.carry import ALL


@pytest.mark.parametrize("name", [name for name, each in ALL.items() if not each.full_size])
def test_carried_vectors(name: str, tmp_path: Path) -> None:
    assert cosines(ALL[name].compute(tmp_path), ALL[name].vectors()).min() >= 0.99999
