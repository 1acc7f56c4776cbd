"""Copies of checkpoints with other values in their JSON files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def edit(path: Path, **changes: Any) -> None:
    """Give keys of a JSON file, which may be missing, these values; None takes one out.

    A key with a dot in it stands in the object of the name before that.
    """
    content = json.loads(path.read_text()) if path.exists() else {}
    for dotted, value in changes.items():
        *above, key = dotted.split(".")
        inner = content
        for name in above:
            inner = inner[name]
        inner[key] = value
        if value is None:
            del inner[key]
    path.write_text(json.dumps(content))


def changed(source: Path, target: Path, file: str = "config.json", **changes: Any) -> Path:
    """Return a copy of a checkpoint, made if it is not there, with other values in one of its files."""
    if not target.exists():
        shutil.copytree(source, target)
    if changes:
        edit(target / file, **changes)
    return target
