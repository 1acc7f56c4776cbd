"""Doors that stand beside the core, for tests."""

from __future__ import annotations

import os
from pathlib import Path


def install(site: Path, module: str) -> str:
    """Write what pip would for a ``module`` with a ``DOOR``, and return the ``PYTHONPATH`` that finds it."""
    name = module.rpartition(".")[2]
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[tessera.doors]\n{name} = {module}:DOOR\n")
    return os.pathsep.join((str(site), str(Path(__file__).parents[2])))
