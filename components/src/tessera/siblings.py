"""Finds the packages that stand beside the core, by the entry points of installed distributions.

The core imports none of them: a door, a kind of engine or a command is loaded by its name in its group.
Standard library alone, and without site-packages: the launcher runs before anything is installed. Where the
distribution is not installed, the ``pyproject.toml`` of the checkout that this file belongs to is read.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Final

DOORS: Final = "tessera.doors"
ENGINES: Final = "tessera.engines"
COMMANDS: Final = "tessera.commands"
MODELS: Final = "tessera.models"

_DISTRIBUTION: Final = "tessera-embed"
_PYPROJECT: Final = Path(__file__).parents[3] / "pyproject.toml"


@cache
def siblings(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of ``group`` in the order of their names; those of one name once."""
    entries = {entry.name: entry for entry in (*_of_checkout(group), *entry_points(group=group))}
    return tuple(entries[name] for name in sorted(entries))


def _of_checkout(group: str) -> list[EntryPoint]:
    """Return the group's entry points from ``pyproject.toml``, where no installed distribution has them."""
    try:
        distribution(_DISTRIBUTION)
    except PackageNotFoundError:
        if not _PYPROJECT.is_file():
            return []
        project = tomllib.loads(_PYPROJECT.read_text())["project"]
        values = project.get("entry-points", {}).get(group, {})
        return [EntryPoint(name, value, group) for name, value in values.items()]
    return []
