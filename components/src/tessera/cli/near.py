"""What a command says of a flag that it does not know."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


def near(flag: str, known: Collection[str]) -> str:
    """``", did you mean --other?"``, or nothing where no known flag is like it."""
    close = get_close_matches(flag, known, n=1)
    return f", did you mean {close[0]}?" if close else ""
