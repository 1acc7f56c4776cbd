"""What SPLADE computes, by its definition, from transformers' masked language model of the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from tests.models.running import Given

Weigh = Callable[[torch.Tensor], torch.Tensor]


class SpladeReference:
    """The checkpoint at ``path`` in float32; ``weigh``, ``pool`` and ``rows`` are there to be replaced.

    They make weights of logits, one row of a text's, and leave out rows.
    """

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoModelForMaskedLM

        self.tokenizer = Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.model: Any = AutoModelForMaskedLM.from_pretrained(path, dtype=torch.float32).eval()
        self.weigh: Weigh = lambda logits: torch.log1p(torch.relu(logits))
        self.pool: Weigh = lambda weights: weights.amax(0)
        self.rows: Weigh = lambda logits: logits

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    @torch.no_grad()
    def row(self, tokens: list[int]) -> np.ndarray:
        """Weights float32 ``[vocab_size]``."""
        logits = self.model(
            input_ids=torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)).long()
        ).logits[0]
        row: np.ndarray = self.pool(self.weigh(self.rows(logits))).numpy()
        return row

    def weights(self, text: str) -> dict[int, float]:
        """The weights that are not 0, by ascending id."""
        row = self.row(self.tokens(text))
        return {int(token): float(row[token]) for token in np.flatnonzero(row)}

    def answer(self, given: Given) -> np.ndarray:
        return self.row(self.tokens("".join(map(str, given.parts))))
