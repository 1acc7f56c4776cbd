"""``tessera-engine``: build engines ahead of time, look into them, and export stages."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from tessera.cli import build, export, inspect
from tessera.errors import TesseraError


def main(arguments: Sequence[str] | None = None) -> None:
    """Exits with 1 and one line on standard error when it cannot do what was asked.

    What SIGTERM or Ctrl-C interrupts leaves nothing behind that looks finished; the status is 143 or 130.
    """
    parser = argparse.ArgumentParser(
        prog="tessera-engine", description="Build engines ahead of time, look into them, and export stages."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (build, export, inspect):
        command.add_to(commands)
    options = parser.parse_args(arguments)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        options.run(options)
    except (TesseraError, OSError) as error:
        print(f"tessera-engine: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
