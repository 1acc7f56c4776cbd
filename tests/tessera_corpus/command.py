"""``tessera embed`` as a command, and a service that it may ask."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.service import Deployment, service

from tessera.defaults import MODEL

EMBED = [sys.executable, "-m", "tessera.cli", "embed"]


def embed(*words: str | Path, status: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(
        [*EMBED, *map(str, words)], capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert ran.returncode == status, ran.stderr
    return ran


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of a service of the demonstration model."""
    deployment = Deployment(model_path=MODEL, engine={}, frontend_flags=("--max-in-flight", "4"))
    with service(deployment, folder / "logs") as urls:
        yield urls[0]
