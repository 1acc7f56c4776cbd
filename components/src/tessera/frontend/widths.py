"""Output widths: those that a checkpoint lists, and those that ``--dimensions-allowed`` adds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from tessera.errors import ConfigError

_WIDTH_OR_RANGE = re.compile(r"([1-9][0-9]{0,8})(?:-([1-9][0-9]{0,8}))?")


@dataclass(frozen=True, slots=True)
class Widths:
    """Numbers of values that a vector may be cut to: ``ranges`` of (least, most), in order and apart."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> Self:
        """Ranges in any order, which may overlap."""
        joined: list[tuple[int, int]] = []
        for least, most in sorted(ranges):
            if joined and least <= joined[-1][1] + 1:
                joined[-1] = joined[-1][0], max(most, joined[-1][1])
            else:
                joined.append((least, most))
        return cls(tuple(joined))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Numbers and ranges, as in ``256,512`` or ``64-2048``; raises ``ValueError`` for what is neither."""
        found = []
        for part in filter(None, re.split(r"[\s,]+", text)):
            match = _WIDTH_OR_RANGE.fullmatch(part)
            least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if least > most:
                raise ValueError(f"{part} is neither a width nor a range of them, such as 512 or 64-2048")
            found.append((least, most))
        return cls.of(found)

    @classmethod
    def offered(cls, trained: Iterable[int], width: int, allowed: str) -> Self:
        """Those that a checkpoint lists, its own ``width`` and what the flag allows beside them.

        Raises ``ConfigError`` for an allowed one beyond the model's.
        """
        given = cls.parse(allowed)
        for least, most in given.ranges:
            if most > width:
                said = f"{least}-{most}" if least < most else f"{most}"
                raise ConfigError(
                    f"--dimensions-allowed {allowed}: {said} goes beyond the model's own width, {width}"
                )
        return cls.of([*given.ranges, *((each, each) for each in {*trained, width})])

    def __contains__(self, width: int) -> bool:
        return any(least <= width <= most for least, most in self.ranges)

    def __str__(self) -> str:
        return ", ".join(f"{least} to {most}" if least < most else f"{least}" for least, most in self.ranges)


def no_widths(flag: str, text: str) -> str | None:
    """Why a flag's value is no list of widths, or None."""
    try:
        Widths.parse(text)
    except ValueError as error:
        return f"{flag}: {error}"
    return None
