"""What encoders compute, from transformers' own classes reading the same files: one input at a time.

Shares no code with Tessera. Text that spells out a special token is parsed here, as the tokenizer's default
is, so inputs for comparisons should not contain any.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional

if TYPE_CHECKING:
    from tests.models.running import Given, Pair


class EncoderReference:
    """The checkpoint at ``path``, in float32; ``pool`` is to be replaced for others than the mean."""

    def __init__(self, path: str | Path, *, scores: bool = False) -> None:
        from transformers import AutoModel, AutoModelForSequenceClassification

        kind = AutoModelForSequenceClassification if scores else AutoModel
        self.tokenizer = Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.model: Any = kind.from_pretrained(path, dtype=torch.float32).eval()

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def pool(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean(0)

    def arguments(self, tokens: list[int]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([tokens]), "attention_mask": torch.ones(1, len(tokens)).long()}

    @torch.no_grad()
    def vector(self, tokens: list[int]) -> np.ndarray:
        hidden = self.model(**self.arguments(tokens)).last_hidden_state[0]
        return functional.normalize(self.pool(hidden), dim=0, eps=1e-12).numpy()

    def answer(self, given: Given) -> np.ndarray:
        """The unit vector of an input of texts."""
        return self.vector(self.tokens("".join(map(str, given.parts))))


class CrossReference(EncoderReference):
    """A cross-encoder; the tokenizer says how a pair lies, and of which type each token is."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, scores=True)
        self.typed = getattr(self.model.config, "type_vocab_size", 1) > 1

    def pair_tokens(self, query: str, document: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(query, document).ids
        return ids

    @torch.no_grad()
    def answer(self, pair: Pair) -> np.ndarray:  # type: ignore[override]
        """The logit, float32 ``[1]``."""
        query, document = ("".join(map(str, side.parts)) for side in (pair.query, pair.document))
        arguments = self.arguments(self.pair_tokens(query, document))
        if self.typed:
            types = self.tokenizer.encode(query, document).type_ids
            arguments["token_type_ids"] = torch.tensor([types])
        logits: np.ndarray = self.model(**arguments).logits[0].numpy()
        return logits
