"""Files that are whole at any moment, whenever the run that writes them is ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to, which takes its place in one move once it is complete."""
    fresh = path.with_name(f"{path.name}.new")
    yield fresh
    fresh.replace(path)
