"""Finds the reference for a checkpoint of the families whose inputs are ``tests.models.running.Given``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tests.references.llama_nemotron_embed import LlamaReference
from tests.references.qwen3 import Qwen3Reference, Qwen3VLReference

if TYPE_CHECKING:
    import numpy as np

    from tests.models.running import Given


class Reference(Protocol):
    def answer(self, given: Given) -> np.ndarray:
        """The unit vector of an input."""
        ...


def reference_of(path: Path) -> Reference:
    """The reference for the checkpoint at ``path``."""
    kinds: dict[str, type[LlamaReference | Qwen3Reference | Qwen3VLReference]] = {
        "llama_bidirec": LlamaReference,
        "qwen3": Qwen3Reference,
        "qwen3_vl": Qwen3VLReference,
    }
    return kinds[json.loads((path / "config.json").read_text())["model_type"]](path)
