"""Directories that are complete or not there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tessera.errors import ConfigError


@contextmanager
def partial_directory(out: Path) -> Iterator[Path]:
    """A directory beside ``out`` that gets its name when the block ends, and is removed when it raises.

    Raises ``ConfigError`` when ``out`` exists.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; name another directory or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        partial.chmod(0o755)
        yield partial
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
