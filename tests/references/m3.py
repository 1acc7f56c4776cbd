"""BGE M3's three outputs as FlagEmbedding 1.4.2 defines them, on transformers' own class.

``m3.py`` (``_process_token_weights``, ``_process_colbert_vecs``) and ``modeling.py`` of its package are the
definition; it shares no code with Tessera. Each mistake is a way to get them wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from tests.references.encoder import EncoderReference


class M3Reference(EncoderReference):
    """The checkpoint at ``path`` with its two heads, in float32."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.sparse = self._linear(path / "sparse_linear.pt")
        self.colbert = self._linear(path / "colbert_linear.pt")
        names = ("<s>", "</s>", "<pad>", "<unk>")
        self.unused = {self.tokenizer.token_to_id(name) for name in names}

    @staticmethod
    def _linear(path: Path) -> torch.nn.Linear:
        state: Any = torch.load(path, weights_only=True)
        linear = torch.nn.Linear(state["weight"].shape[1], state["weight"].shape[0])
        linear.load_state_dict(state)
        return linear

    @torch.no_grad()
    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        found: torch.Tensor = self.model(**self.arguments(list(tokens))).last_hidden_state[0]
        return found

    @torch.no_grad()
    def dense(self, tokens: Sequence[int]) -> np.ndarray:
        found: np.ndarray = functional.normalize(self.hidden(tokens)[0], dim=0).numpy()
        return found

    @torch.no_grad()
    def weights(
        self,
        tokens: Sequence[int],
        *,
        merge: Callable[[float, float], float] = max,
        unused: set[int] | None = None,
    ) -> dict[int, float]:
        """The weight of each token id, ascending."""
        weights = torch.relu(self.sparse(self.hidden(tokens)))[:, 0].tolist()
        dropped = self.unused if unused is None else unused
        found: dict[int, float] = {}
        for token, weight in zip(tokens, weights, strict=True):
            if token not in dropped and weight > 0:
                found[token] = merge(found[token], weight) if token in found else weight
        return dict(sorted(found.items()))

    @torch.no_grad()
    def vectors(self, tokens: Sequence[int], *, first: int = 1, last: int | None = None) -> np.ndarray:
        """float32 ``[tokens - 1, width]``."""
        found: np.ndarray = functional.normalize(
            self.colbert(self.hidden(tokens)[first:last]), dim=-1
        ).numpy()
        return found
