"""Describes one word of the command ``tessera``, for packages that add some, and reads its command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import NoReturn

from tessera.extras import absent
from tessera.terminal import complain


@dataclass(frozen=True, slots=True)
class Command:
    """``module`` has a ``main`` of the arguments and of the command's name, which returns the status.

    ``text`` is its line in ``tessera --help``. ``needs`` are top-level modules that it imports beyond the
    base installation, which ``extra`` installs.
    """

    text: str
    module: str
    extra: str = ""
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """The modules of ``needs`` that are not installed."""
        return absent(*self.needs)


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        complain(f"{self.prog}: {message}; {self.prog} --help lists what there is")
        raise SystemExit(2)
