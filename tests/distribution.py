"""Distributions that only look installed, for tests of what an entry point adds."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def write_distribution(site: Path, name: str, entry_points: str) -> None:
    """Write what pip would of a distribution with nothing but entry points."""
    metadata = site / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)


def install(site: Path, group: str, value: str) -> str:
    """Write what pip would for a module of the tests; return the ``PYTHONPATH`` that finds it.

    ``value`` is ``package.module:ATTRIBUTE``; the entry point has the name of the module.
    """
    name = value.partition(":")[0].rpartition(".")[2]
    write_distribution(site, name, f"[{group}]\n{name} = {value}\n")
    return os.pathsep.join((str(site), str(ROOT)))
