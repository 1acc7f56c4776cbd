"""ColBERT's token vectors as PyLate 1.6 defines them, on transformers' own class; one input at a time.

``ColBERT.tokenize`` and ``ColBERT.encode`` of its package are the definition. It shares no code with Tessera.
Each attribute that is changed is a way to get them wrong.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional

from tests.references.encoder import EncoderReference

if TYPE_CHECKING:
    from tests.models.running import Given


class ColbertReference(EncoderReference):
    """The checkpoint at ``path``, of Stanford's form or PyLate's, in float32."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if (path / "artifact.metadata").exists():
            said = json.loads((path / "artifact.metadata").read_text())
            names = ("query_token_id", "doc_token_id", "query_maxlen", "doc_maxlen", "attend_to_mask_tokens")
            words = list(string.punctuation) if said["mask_punctuation"] else []
            stored = load_file(path / "model.safetensors")
        else:
            said = json.loads((path / "config_sentence_transformers.json").read_text())
            names = ("query_prefix", "document_prefix", "query_length", "document_length")
            names = (*names, "attend_to_expansion_tokens")
            words = said["skiplist_words"]
            stored = load_file(path / "1_Dense" / "model.safetensors")
        query, document, *lengths, attends = (said[name] for name in names)
        self.markers = [[self.tokenizer.token_to_id(name)] for name in (query, document)]
        self.lengths: list[int] = lengths
        self.attends: bool = attends
        self.expands: bool = said.get("do_query_expansion", True)
        self.projection = stored["linear.weight"].float()
        self.skipped = {self.tokenizer.token_to_id(word) for word in words}
        self.normalizes = True
        config = json.loads((path / "tokenizer_config.json").read_text())
        self.first, self.last, self.mask = (
            self.tokenizer.token_to_id(config[f"{name}_token"]) for name in ("cls", "sep", "mask")
        )

    def side(self, text: str, *, query: bool) -> tuple[list[int], int]:
        """The tokens of an input, and how many of them are attended to."""
        length, marker = self.lengths[not query], self.markers[not query]
        words = self.tokenizer.encode(text, add_special_tokens=False).ids
        words = words[: length - 2 - len(marker)]
        tokens = [self.first, *marker, *words, self.last]
        seen = len(tokens)
        if query and self.expands:
            tokens += [self.mask] * (length - len(tokens))
        return tokens, len(tokens) if self.attends else seen

    @torch.no_grad()
    def token_vectors(self, text: str, *, query: bool) -> np.ndarray:
        """float32 ``[rows, width]``."""
        tokens, seen = self.side(text, query=query)
        arguments: dict[str, Any] = self.arguments(tokens)
        arguments["attention_mask"][0, seen:] = 0
        rows = self.model(**arguments).last_hidden_state[0] @ self.projection.T
        if not query:
            rows = rows[[token not in self.skipped for token in tokens]]
        vectors: np.ndarray = (functional.normalize(rows, dim=-1) if self.normalizes else rows).numpy()
        return vectors

    def answer(self, given: Given) -> np.ndarray:
        """float32 ``[rows, width]``, of a query or a document by its role."""
        return self.token_vectors("".join(map(str, given.parts)), query=given.role.value == "query")

    def score(self, query: str, document: str) -> float:
        """MaxSim of the two."""
        products = self.token_vectors(query, query=True) @ self.token_vectors(document, query=False).T
        return float(products.max(1).sum())
