"""Random checkpoints, and the parity tables, printed after the tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.spec import Spec


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = defaultdict(list)
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", []):
        for title, row in getattr(report, "user_properties", []):
            if title.startswith("parity"):
                rows[title].append(row)
    for title, lines in rows.items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)


WriteCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> WriteCheckpoint:
    """Write a random checkpoint; equal arguments share one."""
    root = tmp_path_factory.mktemp("written")
    made: dict[str, Path] = {}

    def write(spec: Spec, *, dtype: str = "float32", seed: int = 0) -> Path:
        key = repr((spec, dtype, seed))
        if key not in made:
            made[key] = root / str(len(made))
            write_checkpoint(made[key], spec, seed=seed, dtype=dtype)
        return made[key]

    return write
