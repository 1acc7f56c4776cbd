"""Random checkpoints of Llama Nemotron Embed, and what those with a vision tower share with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from tessera.models.base import OutputKind
from tessera.models.llama_nemotron_embed.model import Options, read_config
from tessera_tools.random_checkpoint.spec import DecoderSpec, Sizes, prompts_json, rope_json
from tessera_tools.random_checkpoint.tokenizer import byte_level_bpe, template
from tessera_tools.random_checkpoint.weights import RandomTensor, random_tensors

SENTENCE_TRANSFORMERS_FILE: Final = "config_sentence_transformers.json"

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)

LLAMA3_SCALING: Mapping[str, Any] = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSpec(DecoderSpec):
    """A checkpoint of Llama Nemotron Embed; the defaults make one that runs on any machine.

    The vocabulary is ``base_vocab`` byte-pair tokens, ``control_tokens`` tokens that begin with
    ``<|begin_of_text|>``, and ``marks``, in that order of ids. A ``pooling`` of None is not written.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[OutputKind] = OutputKind.VECTOR

    control_tokens: int = 16
    rope_theta: float = 500000.0
    rope_key: str = "rope_scaling"
    rope: Mapping[str, Any] | None = field(default_factory=lambda: LLAMA3_SCALING)
    pooling: str | None = "avg"
    dimensions: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return self.base_vocab + self.control_tokens + len(self.marks)

    def files(self, dtype: str, seed: int) -> dict[str, dict[str, Any]]:
        widths = {"matryoshka_dimensions": list(self.dimensions)} if self.dimensions else {}
        return {
            CONFIG_FILE: {**backbone_json(self), "torch_dtype": dtype, **widths},
            TOKENIZER_FILE: tokenizer_json(self, seed),
            TOKENIZER_CONFIG_FILE: tokenizer_config_json(self),
            SENTENCE_TRANSFORMERS_FILE: sentence_transformers_json(),
        }

    def tensors(self, directory: Path) -> Iterator[RandomTensor]:
        text = read_config(Section.read(directory / CONFIG_FILE), Options(), self.kind)
        stored = {"head.weight": "score.weight", "": self.text_prefix}
        return random_tensors(text.shapes(), distribution, stored)


SMALL: Final[Mapping[str, Any]] = {
    "hidden": 512,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 64,
    "intermediate": 512,
}
PUBLISHED: Final[Mapping[str, Any]] = {
    "hidden": 2048,
    "layers": 16,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 64,
    "intermediate": 8192,
    "base_vocab": 128000,
    "control_tokens": 256,
}

TINY = LlamaSpec(**SMALL)
FULL = LlamaSpec(**PUBLISHED)
SIZES: Final = Sizes(tiny=TINY, full=FULL)


def backbone_json(spec: LlamaSpec) -> dict[str, Any]:
    """What ``config.json`` says about the backbone."""
    return {
        "architectures": ["LlamaBidirectionalModel"],
        "model_type": "llama_bidirec",
        **spec.decoder_json(1e-5),
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        **({} if spec.pooling is None else {"pooling": spec.pooling}),
        **rope_json(spec.rope_key, spec.rope_theta, spec.rope),
    }


def sentence_transformers_json() -> dict[str, Any]:
    """``config_sentence_transformers.json``."""
    return prompts_json({"query": "query: ", "document": "passage: "})


def tokenizer_json(spec: LlamaSpec, seed: int, sentences: Iterable[str] | None = None) -> dict[str, Any]:
    """``tokenizer.json``; ``sentences`` replace those that ``seed`` stands for."""
    if spec.control_tokens < len(_CONTROL):
        raise ValueError("the vocabulary has no room for the control tokens")
    written = byte_level_bpe(
        size=spec.base_vocab,
        split=_SPLIT,
        control=(*_control_names(spec.control_tokens), *spec.marks),
        seed=seed,
        sentences=sentences,
        whole_words=True,
    )
    begin = _CONTROL[0]
    written["post_processor"] = template((begin, "A"), (begin, "A", begin, "B"), {begin: spec.base_vocab})
    return written


def tokenizer_config_json(spec: LlamaSpec) -> dict[str, Any]:
    """``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "pad_token": "<|end_of_text|>",
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": spec.max_positions,
    }


def distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation that keep activations near unit size and different inputs apart."""
    if name.endswith("bias"):
        return 0.0, 0.05
    if "norm" in name or name == "projector.0.weight":
        return 1.0, 0.1
    if name.endswith(("embed_tokens.weight", "position_embedding.weight", "probe")):
        return 0.0, 0.5
    gain = 1.0
    if "patch_embedding" in name or "patch_conv" in name:
        gain = 4.0
    elif "q_proj" in name or "k_proj" in name:
        gain = 1.5
    elif name.endswith("head.weight"):  # logits of pairs deviate by more than 1
        gain = 8.0
    return 0.0, gain / math.sqrt(math.prod(shape[1:]))


def _control_names(count: int) -> list[str]:
    reserved = count - len(_CONTROL)
    return [*_CONTROL, *(f"<|reserved_special_token_{3 + index}|>" for index in range(reserved))]
