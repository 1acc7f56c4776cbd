"""How far a source has been read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a source has been read, in what it counts itself in: files or bytes. ``most`` 0 is unknown."""

    read: int
    most: int = 0


@dataclass(slots=True, kw_only=True)
class Counted:
    """What sources have in common: one counts what it reads, and passes nothing over but where it says so."""

    _read: int = 0
    _most: int = 0

    def position(self) -> Position:
        return Position(read=self._read, most=self._most)

    def passed_over(self) -> Mapping[str, int]:
        return {}
