"""What the model computes, from transformers' own ``LlamaModel``: one input at a time, without any cache.

Shares no code with Tessera. Text that spells out a special token is parsed here, as the tokenizer's default
is, so inputs for comparisons should not contain any.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional

if TYPE_CHECKING:
    from tests.models.running import Given

PREFIXES = {"query": "query: ", "passage": "passage: ", "none": ""}


class LlamaReference:
    """The checkpoint at ``path``, in float32."""

    def __init__(self, path: str | Path) -> None:
        from transformers import LlamaConfig, LlamaModel

        path = Path(path)
        config = json.loads((path / "config.json").read_text())
        known = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.model = LlamaModel._from_config(LlamaConfig(**known), attn_implementation="sdpa")
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            weights |= load_file(file)
        self.model.load_state_dict(
            {name.removeprefix("model."): value for name, value in weights.items() if "score." not in name},
            strict=True,
        )
        self.model.float().eval()
        self.pool: Callable[[torch.Tensor], torch.Tensor] = {
            "avg": lambda hidden: hidden.mean(0),
            "last": lambda hidden: hidden[-1],
            "cls": lambda hidden: hidden[0],
        }[config.get("pooling", "avg")]
        self.causal = False

    def tokens(self, text: str, role: str) -> list[int]:
        """Ids with the first token, which the tokenizer's post-processor puts there."""
        return self.tokenizer.encode(PREFIXES[role] + text).ids

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """After the final norm, under a mask that hides nothing: ``[tokens, hidden]``."""
        mask = None if self.causal else torch.zeros(1, 1, len(tokens), len(tokens))
        output = self.model(input_ids=torch.tensor([tokens]), attention_mask=mask, use_cache=False)
        return output.last_hidden_state[0]

    def vector(self, tokens: list[int]) -> np.ndarray:
        return functional.normalize(self.pool(self.hidden(tokens)), dim=0, eps=1e-12).numpy()

    def answer(self, given: Given) -> np.ndarray:
        """The unit vector of an input of texts."""
        return self.vector(self.tokens("".join(map(str, given.parts)), given.role.value))
