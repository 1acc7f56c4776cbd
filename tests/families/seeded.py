"""Families whose checkpoints are a seed in ``config.json``, from which the weights are made."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class SeededFamily:
    """Implements ``tessera.models.base.Family``: ``model`` opens a path with its seed."""

    name: str
    model: Callable[[Path, int], Any]

    @property
    def model_types(self) -> tuple[str]:
        return (f"test_{self.name}",)

    def open_model(self, path: Path, options: Mapping[str, object]) -> Any:
        return self.model(path, json.loads((path / "config.json").read_text())["seed"])

    def make_checkpoint(self, path: Path, seed: int) -> Path:
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"model_type": self.model_types[0], "seed": seed}))
        return path
