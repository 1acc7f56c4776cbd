"""A family of text alone that gives a row for each token, as late interaction does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tessera.models.base import Output, OutputKind, TextTensors
from tests.families.dual_encoder import HIDDEN, DualEncoder, weights


def make_checkpoint(path: Path, seed: int) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "test_token_rows", "seed": seed}))
    return path


def reference(seed: int, text: str) -> np.ndarray:
    """The text's rows, a unit vector for each of its bytes, by plain numpy."""
    rows = weights(seed)["tokens"][list(text.encode())]
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class TokenRows(DualEncoder):
    family = "token_rows"
    output = Output(kind=OutputKind.TOKENS, width=HIDDEN)
    vision = None  # type: ignore[assignment]

    def load_text(self, *, dtype: str, device: str) -> Any:
        import torch

        table = torch.from_numpy(weights(self.seed)["tokens"])

        def forward(batch: TextTensors) -> torch.Tensor:
            return table[batch.input_ids]

        return forward


class TokenRowsFamily:
    """Implements ``tessera.models.base.Family``."""

    name = "token_rows"
    model_types = ("test_token_rows",)

    def open_model(self, path: Path, options: Mapping[str, object]) -> TokenRows:
        return TokenRows(path, json.loads((path / "config.json").read_text())["seed"])


FAMILY = TokenRowsFamily()
