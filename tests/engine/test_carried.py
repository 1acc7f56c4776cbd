"""The engines of every family on the CPU: the same checks that a card's tests make, which run seldom."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.carrying import COMPILED, ELSEWHERE, ENCODERS, TOWERS, assert_text, assert_towers
from tests.references.carry import ALL
from tests.tessera_engines.aoti.exported import leave_uncompiled


def test_every_family_is_among_them() -> None:
    named = [*COMPILED, *ENCODERS, *TOWERS, *ELSEWHERE]
    assert sorted(named) == sorted(name for name, each in ALL.items() if not each.full_size)


@pytest.mark.parametrize("name", (*COMPILED, *ENCODERS))
def test_text(name: str, tmp_path: Path) -> None:
    assert_text(name, "plain", tmp_path, "cpu")


@pytest.mark.parametrize("name", TOWERS)
def test_two_towers(name: str, tmp_path: Path) -> None:
    assert_towers(name, "plain", tmp_path, "cpu")


@pytest.mark.compiles
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_uncompiled(monkeypatch)
    assert_text(name, "aoti", tmp_path, "cpu")
