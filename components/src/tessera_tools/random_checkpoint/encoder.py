"""Random checkpoints of BERT and XLM-RoBERTa, and of their cross-encoders."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.checkpoint.section import CONFIG_FILE
from tessera.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from tessera.checkpoint.weights import Shapes
from tessera_tools.random_checkpoint.pieces import BERT, unigram, word_piece
from tessera_tools.random_checkpoint.pieces import ROBERTA as ROBERTA_TOKENS
from tessera_tools.random_checkpoint.spec import Sizes, declared_json, splade_json
from tessera_tools.random_checkpoint.weights import (
    RandomTensor,
    norm_shapes,
    product_shapes,
    random_tensors,
)

# The deviation in tables of tokens and positions.
_TABLE: Final = 0.5
_TYPED: Final = ("input_ids", "token_type_ids", "attention_mask")
_PROMPTS: Final = {"query": "query: ", "document": "passage: "}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """A checkpoint of BERT, or with ``roberta`` of XLM-RoBERTa; ``scores`` gives it a head of one label.

    ``pooling`` is what an embedder declares, ``prompted`` whether it declares E5's prompts. With ``masked``
    it is one of SPLADE: it has the head of a masked language model, whose decoder has weights of its own if
    it is ``untied``.

    ``prefix`` stands before the names of all tensors but the head's. An ``activation`` is declared as
    ``sentence-transformers`` does for cross-encoders; None: it is not.
    """

    hidden: int = 128
    layers: int = 3
    heads: int = 4
    intermediate: int = 256
    vocab_size: int = 2000
    max_positions: int = 512
    types: int = 2
    roberta: bool = False
    scores: bool = False
    masked: bool = False
    untied: bool = False
    prefix: str = ""
    activation: str | None = None
    pooling: str = "mean_tokens"
    prompted: bool = True
    shards: int = 1

    def files(self, dtype: str, seed: int) -> dict[str, Any]:
        prompts = _PROMPTS if self.prompted else {}
        pieces = unigram(self.vocab_size) if self.roberta else word_piece(self.vocab_size)
        return {
            CONFIG_FILE: self._config(dtype),
            TOKENIZER_FILE: pieces,
            TOKENIZER_CONFIG_FILE: self._tokenizer_config(),
            **self._declared(prompts),
        }

    def tensors(self, directory: Path) -> Iterator[RandomTensor]:
        return random_tensors(self._shapes(), self._distribution)

    def _distribution(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Return mean and deviation; one in forty logits is above 0, and few of them far above."""
        mean, deviation = _distribution(name, shape)
        if not name.startswith("cls.predictions."):
            return mean, deviation
        spread = 0.3
        if "LayerNorm" in name:
            return spread * mean, spread * deviation
        if name.endswith(("predictions.bias", "decoder.bias")):
            mean = -2 * spread * _TABLE * math.sqrt(self.hidden)
        return mean, deviation

    def _declared(self, prompts: Mapping[str, str]) -> Mapping[str, Any]:
        if self.masked:
            return splade_json(self.vocab_size, prompts=prompts)
        return {} if self.scores else declared_json(self.pooling, self.hidden, prompts=prompts)

    def _config(self, dtype: str) -> dict[str, Any]:
        name, kind = ("XLMRoberta", "xlm-roberta") if self.roberta else ("Bert", "bert")
        declared: dict[str, Any] = {}
        if self.scores:
            declared |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        if self.activation is not None:
            declared["sbert_ce_default_activation_function"] = self.activation
        if self.masked:
            declared["tie_word_embeddings"] = not self.untied
        task = "ForSequenceClassification" if self.scores else "ForMaskedLM" if self.masked else "Model"
        return {
            "architectures": [f"{name}{task}"],
            "model_type": kind,
            "torch_dtype": dtype,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.intermediate,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5 if self.roberta else 1e-12,
            "max_position_embeddings": self.max_positions,
            "type_vocab_size": self.types,
            "vocab_size": self.vocab_size,
            "pad_token_id": 1 if self.roberta else 0,
            "position_embedding_type": "absolute",
            **declared,
        }

    def _tokenizer_config(self) -> dict[str, Any]:
        if self.roberta:
            first, pad, last, unknown, mask = ROBERTA_TOKENS
        else:
            pad, unknown, first, last, mask = BERT
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "cls_token": first,
            "sep_token": last,
            "pad_token": pad,
            "unk_token": unknown,
            "mask_token": mask,
            "model_max_length": self.max_positions - (2 if self.roberta else 0),
            **({} if self.roberta or not self.scores else {"model_input_names": _TYPED}),
        }

    def _shapes(self) -> Shapes:
        hidden, wide = self.hidden, self.intermediate
        shapes: Shapes = {
            "embeddings.word_embeddings.weight": (self.vocab_size, hidden),
            "embeddings.position_embeddings.weight": (self.max_positions, hidden),
            "embeddings.token_type_embeddings.weight": (self.types, hidden),
            **norm_shapes("embeddings.LayerNorm", hidden),
        }
        for number in range(self.layers):
            layer = f"encoder.layer.{number}"
            for name in ("query", "key", "value"):
                shapes |= product_shapes(f"{layer}.attention.self.{name}", hidden, hidden)
            shapes |= product_shapes(f"{layer}.attention.output.dense", hidden, hidden)
            shapes |= norm_shapes(f"{layer}.attention.output.LayerNorm", hidden)
            shapes |= product_shapes(f"{layer}.intermediate.dense", hidden, wide)
            shapes |= product_shapes(f"{layer}.output.dense", wide, hidden)
            shapes |= norm_shapes(f"{layer}.output.LayerNorm", hidden)
        if not (self.masked or (self.roberta and self.scores)):
            shapes |= product_shapes("pooler.dense", hidden, hidden)
        shapes = {f"{self.prefix}{name}": shape for name, shape in shapes.items()}
        if self.scores and self.roberta:
            shapes |= product_shapes("classifier.dense", hidden, hidden)
            shapes |= product_shapes("classifier.out_proj", hidden, 1)
        elif self.scores:
            shapes |= product_shapes("classifier", hidden, 1)
        if self.masked:
            shapes |= product_shapes("cls.predictions.transform.dense", hidden, hidden)
            shapes |= norm_shapes("cls.predictions.transform.LayerNorm", hidden)
            shapes["cls.predictions.bias"] = (self.vocab_size,)
            if self.untied:
                shapes |= product_shapes("cls.predictions.decoder", hidden, self.vocab_size)
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class M3Spec(EncoderSpec):
    """A checkpoint of BGE M3: XLM-RoBERTa with heads of token weights and of token vectors."""

    roberta: bool = True
    types: int = 1
    max_positions: int = 514
    pooling: str = "cls_token"
    prompted: bool = False

    def pickled(self, seed: int) -> Mapping[str, Mapping[str, npt.NDArray[np.float32]]]:
        """The tensors of ``sparse_linear.pt`` and ``colbert_linear.pt``; half of the weights are 0."""
        source = np.random.default_rng(seed)

        def product(columns: int) -> Mapping[str, npt.NDArray[np.float32]]:
            weight = source.standard_normal((columns, self.hidden), np.float32) / math.sqrt(self.hidden)
            return {"weight": weight.astype(np.float32), "bias": np.full(columns, 0.1, np.float32)}

        return {"sparse_linear.pt": product(1), "colbert_linear.pt": product(self.hidden)}


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and deviation that show a mistake: norms and biases are far from trivial."""
    if "LayerNorm" in name:
        return (1.0, 0.2) if name.endswith("weight") else (0.0, 0.2)
    if name.endswith("bias"):
        return 0.0, 0.2
    if "embeddings" in name or "decoder" in name:
        return 0.0, _TABLE
    gain = 2.0 if ".query." in name or ".key." in name else 1.0
    if name.startswith("classifier") and shape[0] == 1:  # logits of pairs deviate by more than 1
        gain = 8.0
    return 0.0, gain / math.sqrt(shape[1])


ROBERTA: Final[Mapping[str, Any]] = {"roberta": True, "types": 1, "max_positions": 514}
BASE: Final[Mapping[str, Any]] = {"hidden": 768, "layers": 12, "heads": 12, "intermediate": 3072}
_LARGE: Final[Mapping[str, Any]] = {"hidden": 1024, "layers": 24, "heads": 16, "intermediate": 4096}
_MINI: Final[Mapping[str, Any]] = {"hidden": 384, "layers": 6, "heads": 12, "intermediate": 1536}
UNCASED: Final[Mapping[str, Any]] = {"vocab_size": 30522}
MULTILINGUAL: Final[Mapping[str, Any]] = {"vocab_size": 250002, "max_positions": 8194}

TINY = EncoderSpec()
FULL = EncoderSpec(**BASE, **UNCASED)
SPLADE_TINY = EncoderSpec(masked=True, prefix="bert.", prompted=False)
SPLADE_FULL = replace(SPLADE_TINY, **BASE, **UNCASED)
RERANK_TINY = EncoderSpec(scores=True, prefix="bert.", activation="torch.nn.modules.linear.Identity")
RERANK_FULL = replace(RERANK_TINY, **_MINI, **UNCASED)
ROBERTA_TINY = EncoderSpec(**ROBERTA)
ROBERTA_FULL = EncoderSpec(**{**ROBERTA, **_LARGE, **MULTILINGUAL})
M3_TINY = M3Spec()
M3_FULL = M3Spec(**{**_LARGE, **MULTILINGUAL})
ROBERTA_RERANK_TINY = EncoderSpec(**ROBERTA, scores=True, prefix="roberta.")
ROBERTA_RERANK_FULL = replace(ROBERTA_FULL, scores=True, prefix="roberta.")

SIZES: Final = Sizes(tiny=TINY, full=FULL)
SPLADE_SIZES: Final = Sizes(tiny=SPLADE_TINY, full=SPLADE_FULL)
RERANK_SIZES: Final = Sizes(tiny=RERANK_TINY, full=RERANK_FULL)
ROBERTA_SIZES: Final = Sizes(tiny=ROBERTA_TINY, full=ROBERTA_FULL)
M3_SIZES: Final = Sizes(tiny=M3_TINY, full=M3_FULL)
ROBERTA_RERANK_SIZES: Final = Sizes(tiny=ROBERTA_RERANK_TINY, full=ROBERTA_RERANK_FULL)
