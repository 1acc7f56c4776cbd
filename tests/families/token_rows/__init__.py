"""A family of text alone that gives a row for each token, as late interaction does."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.models.base import Output, OutputKind, TextTensors
from tests.families.dual_encoder import HIDDEN, DualEncoder, weights
from tests.families.seeded import SeededFamily


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


FAMILY = SeededFamily("token_rows", TokenRows)
make_checkpoint = FAMILY.make_checkpoint
