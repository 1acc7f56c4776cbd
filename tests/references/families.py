"""Finds the reference for a checkpoint, by its family or the class that ``config.json`` names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tests.references.colbert import ColbertReference
from tests.references.colembed import NemotronColEmbedReference
from tests.references.encoder import CrossReference, EncoderReference
from tests.references.llama_nemotron_embed import LlamaReference
from tests.references.llama_nemotron_vl import ColEmbedReference
from tests.references.llama_nemotron_vl import Reference as LlamaNemotronVLReference
from tests.references.ministral3 import Ministral3Reference
from tests.references.mistral3 import Mistral3Reference
from tests.references.qwen3 import (
    ColQwen3Reference,
    Qwen3Reference,
    Qwen3RerankReference,
    Qwen3VLReference,
    Qwen3VLRerankReference,
)
from tests.references.rerank import RerankReference, RerankVLReference
from tests.references.splade import SpladeReference
from tests.references.towers import ClipReference, Siglip2Reference, SiglipReference

if TYPE_CHECKING:
    import numpy as np


class Reference(Protocol):
    def answer(self, given: Any) -> np.ndarray:
        """The unit vector of an input, or one of each token; the logit of a pair."""
        ...


_OF_FAMILY: dict[str, Callable[[Path], Reference]] = {
    "bert_colbert": ColbertReference,
    "qwen3_rerank": Qwen3RerankReference,
    "qwen3_vl_rerank": Qwen3VLRerankReference,
    "xlm_roberta_colbert": ColbertReference,
}
"""Of families whose classes are those of others."""


def reference_of(path: Path, family: str = "") -> Reference:
    """The reference for the checkpoint at ``path``, which its files may not be enough to tell a family of."""
    named = json.loads((path / "config.json").read_text())["architectures"][0]
    if (path / "1_LogitScore").exists():
        family = "qwen3_vl_rerank" if "VL" in named else "qwen3_rerank"
    if family in _OF_FAMILY:
        return _OF_FAMILY[family](path)
    kinds: dict[str, Callable[[Path], Reference]] = {
        "BertForMaskedLM": SpladeReference,
        "BertForSequenceClassification": CrossReference,
        "BertModel": EncoderReference,
        "CLIPModel": ClipReference,
        "ColQwen3": ColQwen3Reference,
        "DistilBertForMaskedLM": SpladeReference,
        "DistilBertForSequenceClassification": CrossReference,
        "DistilBertModel": EncoderReference,
        "LlamaBidirectionalForSequenceClassification": RerankReference,
        "LlamaBidirectionalModel": LlamaReference,
        "LlamaNemotronColEmbedVLModel": ColEmbedReference,
        "LlamaNemotronVLForSequenceClassification": RerankVLReference,
        "LlamaNemotronVLModel": LlamaNemotronVLReference,
        "Ministral3Model": Ministral3Reference,
        "Mistral3Model": Mistral3Reference,
        "OpsColQwen3Model": ColQwen3Reference,
        "Qwen3ForCausalLM": Qwen3Reference,
        "Qwen3ForSequenceClassification": Qwen3RerankReference,
        "Qwen3VLForConditionalGeneration": Qwen3VLReference,
        "Qwen3VLForSequenceClassification": Qwen3VLRerankReference,
        "Qwen3VLNemotronEmbedModel": NemotronColEmbedReference,
        "Siglip2Model": Siglip2Reference,
        "SiglipModel": SiglipReference,
        "XLMRobertaForSequenceClassification": CrossReference,
        "XLMRobertaModel": EncoderReference,
    }
    return kinds[named](path)
