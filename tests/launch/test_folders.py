"""Folders that last as long as a process of their service."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tessera.launch import folders
from tessera.launch.folders import Folders


def test_what_a_service_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(folders, "_NEW_SECONDS", -60.0)
    first = Folders()
    left = first.make("discovery")
    (left / "entry").write_text("x")
    # A child that outlives the launcher keeps the lock.
    child = os.dup(first.descriptor)
    os.close(first.descriptor)
    second = Folders()
    assert left.exists() and second.make("metrics").stat().st_mode & 0o777 == 0o700
    os.close(child)
    third = Folders()
    assert not left.exists()
    for made in (second, third):
        made.remove()
    assert list(tmp_path.iterdir()) == []
