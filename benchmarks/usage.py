"""What a benchmark's ``--help`` says."""

from __future__ import annotations

import argparse

from tessera.flags import HelpFormatter


def parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """For ``python -m command``, described by its docstring without the command and the marks of code."""
    said = (doc or "").partition(": ")[2].replace("``", "")
    said = said[:1].upper() + said[1:]
    return argparse.ArgumentParser(
        prog=f"python -m {command}", description=said, formatter_class=HelpFormatter
    )
