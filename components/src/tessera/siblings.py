"""Finds the packages that stand beside the core, by the entry points of installed distributions.

The core imports none of them: a client's API, a door, a kind of engine or a command is loaded by its name in
its group. Standard library alone, and without site-packages: the launcher runs before anything is installed.
In a checkout its ``pyproject.toml`` says what it holds, since what was installed of it may be older, or
nothing.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from traceback import extract_tb
from typing import Any, Final

from tessera.errors import ConfigError

CLIENT_APIS: Final = "tessera.apis"
DOORS: Final = "tessera.doors"
ENGINES: Final = "tessera.engines"
COMMANDS: Final = "tessera.commands"
MODELS: Final = "tessera.models"

DISTRIBUTION: Final = "tessera-embed"
_PYPROJECT: Final = Path(__file__).parents[3] / "pyproject.toml"


@cache
def siblings(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of ``group`` in the order of their names; those of one name once."""
    entries = {entry.name: entry for entry in entry_points(group=group)}
    checkout = _of_checkout()
    if checkout is not None:
        own = {name: EntryPoint(name, value, group) for name, value in checkout.get(group, {}).items()}
        # What is installed of the checkout and no longer in it is not there.
        others = {name: entry for name, entry in entries.items() if name not in own}
        entries = own | {
            name: entry for name, entry in others.items() if distribution_of(entry) != DISTRIBUTION
        }
    return tuple(entries[name] for name in sorted(entries))


def load(entry: EntryPoint) -> Any:
    """Return what an entry point names.

    Raises ``ConfigError`` for one that cannot be imported: it names the distribution, which somebody else may
    have written, and the line that failed.
    """
    try:
        return entry.load()
    except Exception as error:  # of a module's own code any
        frame = extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"the package {distribution_of(entry)} adds {entry.name} = {entry.value} to {entry.group}, which"
            f" cannot be loaded: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        ) from error


def distribution_of(entry: EntryPoint) -> str:
    """Return the name of the distribution that declares an entry point."""
    return DISTRIBUTION if entry.dist is None else entry.dist.name


def checkout() -> Path | None:
    """Return the root of the checkout that this code is in; None where it was installed."""
    return None if _of_checkout() is None else _PYPROJECT.parent


@cache
def _of_checkout() -> dict[str, dict[str, str]] | None:
    """Return the entry points in ``pyproject.toml`` by their groups; None where this is no checkout."""
    if not _PYPROJECT.is_file():
        return None
    project = tomllib.loads(_PYPROJECT.read_text()).get("project", {})
    groups: dict[str, dict[str, str]] = project.get("entry-points", {})
    return groups if project.get("name") == DISTRIBUTION else None
