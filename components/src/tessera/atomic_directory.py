"""Makes directories that are complete or not there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tessera.errors import ConfigError


@contextmanager
def atomic_directory(out: Path, *, first_wins: bool = False) -> Iterator[Path]:
    """A directory beside ``out`` that gets its name when the block ends, and is removed when it raises.

    Raises ``ConfigError`` when ``out`` exists. If another process completes it meanwhile, that one stays,
    and it is an ``OSError`` unless ``first_wins``.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; name another directory or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        partial.chmod(0o755)
        yield partial
        try:
            partial.rename(out)
        except OSError:
            if not (first_wins and out.exists()):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
