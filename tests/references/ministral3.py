"""What Ministral 3's decoder computes, from transformers' own ``Ministral3Model``, one input at a time.

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
from torch.nn import functional

if TYPE_CHECKING:
    from tests.models.running import Given

PREFIXES = {"query": "query: ", "passage": "passage: ", "none": ""}
POOLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "avg": lambda hidden: hidden.mean(0),
    "last": lambda hidden: hidden[-1],
    "cls": lambda hidden: hidden[0],
}


class Ministral3Reference:
    """The checkpoint at ``path``, in float32."""

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer, Ministral3Config, Ministral3Model

        path = Path(path)
        config = json.loads((path / "config.json").read_text())
        known = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = Ministral3Model._from_config(Ministral3Config(**known), attn_implementation="sdpa")
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            weights |= load_file(file)
        self.model.load_state_dict(
            {name.removeprefix("model."): value for name, value in weights.items()}, strict=True
        )
        self.model.float().eval()
        self.causal = config.get("is_causal", True)
        self.pool = POOLINGS[config.get("pooling", "avg")]

    def tokens(self, text: str, role: str) -> list[int]:
        """Ids with what the tokenizer puts around a text."""
        return list(self.tokenizer(PREFIXES[role] + text).input_ids)

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """After the final norm: ``[tokens, hidden]``."""
        count = len(tokens)
        mask = torch.zeros(1, 1, count, count)
        if self.causal:
            mask += torch.full((count, count), -torch.inf).triu(1)
        output = self.model(input_ids=torch.tensor([tokens]), attention_mask=mask, use_cache=False)
        return output.last_hidden_state[0]

    def vector(self, tokens: list[int]) -> np.ndarray:
        return functional.normalize(self.pool(self.hidden(tokens)), dim=0, eps=1e-12).numpy()

    def answer(self, given: Given) -> np.ndarray:
        """The unit vector of an input of texts."""
        return self.vector(self.tokens("".join(map(str, given.parts)), given.role.value))
