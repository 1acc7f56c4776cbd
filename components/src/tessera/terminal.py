"""Lines for people at a terminal, in which nothing that others wrote moves the cursor or changes a colour."""

from __future__ import annotations

import sys


def printable(text: str, keep: str = "") -> str:
    """Put U+FFFD in place of each character that a terminal would obey and not show, but for ``keep``."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else "\ufffd" for one in text)


def say(text: str) -> None:
    """Print lines on standard output."""
    print(printable(text, keep="\n"))


def complain(text: str) -> None:
    """Print lines on standard error."""
    sys.stderr.write(printable(f"{text}\n", keep="\n"))
