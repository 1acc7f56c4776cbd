"""``tessera-engine``: build engines ahead of time, look into them, and export stages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tessera.commands import build, export, inspect
from tessera.errors import TesseraError


def main(arguments: Sequence[str] | None = None) -> None:
    """Exits with 1 and one line on standard error when it cannot do what was asked."""
    parser = argparse.ArgumentParser(
        prog="tessera-engine", description="Build engines ahead of time, look into them, and export stages."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (build, export, inspect):
        command.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (TesseraError, OSError) as error:
        print(f"tessera-engine: {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
