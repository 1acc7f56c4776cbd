"""Random checkpoints of Llama Nemotron Embed VL: shapes, files and distributions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tessera.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from tessera.checkpoint.weights import Shapes
from tessera.models.llama_nemotron_vl.config import ModelConfig
from tessera.models.llama_nemotron_vl.config_reader import CONFIG_FILE, PROCESSOR_FILE, read_config
from tessera.models.llama_nemotron_vl.tensors import expected
from tessera.tools.random_checkpoint.tokenizer import byte_level_bpe
from tessera.tools.random_checkpoint.weights import RandomTensor

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
_IMAGE = (
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<|im_end|>",
    "<quad>",
    "</quad>",
    "<ref>",
    "</ref>",
    "<box>",
    "</box>",
)

LLAMA3_SCALING: Mapping[str, Any] = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """What to write; the defaults make a checkpoint that runs on any machine.

    The vocabulary is ``base_vocab`` byte-pair tokens, ``control_tokens`` tokens that begin with
    ``<|begin_of_text|>``, and ten tokens that begin with ``<img>``, in that order of ids.
    """

    image_size: int = 512
    patch_size: int = 16
    vision_hidden: int = 64
    vision_layers: int = 2
    vision_heads: int = 4
    vision_intermediate: int = 128
    vision_activation: str = "gelu_pytorch_tanh"
    vision_head: bool = True
    select_layer: int = -1
    downsample_factor: int = 2
    pixel_shuffle: str = "v2"
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 256
    base_vocab: int = 2000
    control_tokens: int = 16
    max_positions: int = 131072
    rope_theta: float = 500000.0
    rope_key: str = "rope_scaling"
    rope: Mapping[str, Any] | None = field(default_factory=lambda: LLAMA3_SCALING)
    pooling: str = "avg"
    max_input_tiles: int = 6
    dynamic_image_size: bool = True
    use_thumbnail: bool = True
    p_max_length: int | None = 10240
    dimensions: tuple[int, ...] = ()
    shards: int = 1
    vision_prefix: str = "vision_model.vision_model."
    projector_prefix: str = "mlp1."
    text_prefix: str = "language_model."

    @property
    def image_start_id(self) -> int:
        return self.base_vocab + self.control_tokens

    @property
    def vocab_size(self) -> int:
        return self.image_start_id + 10

    @property
    def tokens_per_tile(self) -> int:
        return (self.image_size // self.patch_size // self.downsample_factor) ** 2

    def files(self, dtype: str, seed: int) -> dict[str, dict[str, Any]]:
        """The JSON files by name."""
        return {
            CONFIG_FILE: config_json(self, dtype),
            PROCESSOR_FILE: processor_json(self),
            TOKENIZER_FILE: tokenizer_json(self, seed),
            TOKENIZER_CONFIG_FILE: tokenizer_config_json(self),
            SENTENCE_TRANSFORMERS_FILE: sentence_transformers_json(),
        }

    def tensors(self, directory: Path) -> Iterator[RandomTensor]:
        """The tensors in the files' order; the JSON files are in ``directory`` already."""
        prefixes = {
            "vision": self.vision_prefix,
            "projector": self.projector_prefix,
            "text": self.text_prefix,
        }
        for name, shape in all_shapes(read_config(directory)).items():
            part, _, rest = name.partition(".")
            mean, deviation = _distribution(name, shape)
            yield RandomTensor(name=prefixes[part] + rest, shape=shape, mean=mean, deviation=deviation)


TINY = CheckpointSpec()

FULL = CheckpointSpec(
    vision_hidden=1152,
    vision_layers=27,
    vision_heads=16,
    vision_intermediate=4304,
    hidden=2048,
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    intermediate=8192,
    base_vocab=128000,
    control_tokens=256,
)


def config_json(spec: CheckpointSpec, dtype: str) -> dict[str, Any]:
    """``config.json``, its stale tile limit included."""
    rope = dict(spec.rope) if spec.rope is not None else None
    if spec.rope_key == "rope_parameters":
        positions: dict[str, Any] = {
            "rope_parameters": {"rope_theta": spec.rope_theta, "rope_type": "default", **(rope or {})}
        }
    else:
        positions = {"rope_theta": spec.rope_theta, "rope_scaling": rope}
    optional: dict[str, Any] = {}
    if spec.dimensions:
        optional["matryoshka_dimensions"] = list(spec.dimensions)
    if spec.p_max_length is not None:
        optional["p_max_length"] = spec.p_max_length
    return {
        "architectures": ["LlamaNemotronVLModel"],
        "model_type": "llama_nemotron_vl",
        "torch_dtype": dtype,
        "pooling": spec.pooling,
        "bidirectional_attention": True,
        "img_context_token_id": spec.image_start_id + 2,
        "force_image_size": spec.image_size,
        "downsample_ratio": 1 / spec.downsample_factor,
        "select_layer": spec.select_layer,
        "ps_version": spec.pixel_shuffle,
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "template": "bidirectional-llama-retriever",
        "max_input_tiles": 2,
        "q_max_length": 512,
        "query_prefix": "query:",
        "passage_prefix": "passage:",
        "vocab_size": spec.vocab_size,
        **optional,
        "llm_config": {
            "architectures": ["LlamaBidirectionalModel"],
            "model_type": "llama_bidirec",
            "hidden_size": spec.hidden,
            "num_hidden_layers": spec.layers,
            "intermediate_size": spec.intermediate,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "max_position_embeddings": spec.max_positions,
            "vocab_size": spec.vocab_size,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "pooling": spec.pooling,
            **positions,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": spec.vision_hidden,
            "intermediate_size": spec.vision_intermediate,
            "num_hidden_layers": spec.vision_layers,
            "num_attention_heads": spec.vision_heads,
            "image_size": spec.image_size,
            "patch_size": spec.patch_size,
            "num_channels": 3,
            "layer_norm_eps": 1e-6,
            "hidden_act": spec.vision_activation,
            "vision_use_head": spec.vision_head,
        },
    }


def processor_json(spec: CheckpointSpec) -> dict[str, Any]:
    """``processor_config.json``."""
    return {
        "processor_class": "LlamaNemotronVLProcessor",
        "max_input_tiles": spec.max_input_tiles,
        "num_image_token": spec.tokens_per_tile,
        "image_size": spec.image_size,
        "use_thumbnail": spec.use_thumbnail,
        "dynamic_image_size": spec.dynamic_image_size,
        "norm_type": "siglip",
        "query_prefix": "query:",
        "passage_prefix": "passage:",
        "template": "bidirectional-llama-retriever",
    }


def sentence_transformers_json() -> dict[str, Any]:
    """``config_sentence_transformers.json``."""
    return {
        "prompts": {"query": "query: ", "document": "passage: "},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }


def tokenizer_json(spec: CheckpointSpec, seed: int, sentences: Iterable[str] | None = None) -> dict[str, Any]:
    """``tokenizer.json``; ``sentences`` replace those that ``seed`` stands for."""
    if spec.control_tokens < len(_CONTROL):
        raise ValueError("the vocabulary has no room for the control tokens")
    written = byte_level_bpe(
        size=spec.base_vocab,
        split=_SPLIT,
        control=(*_control_names(spec.control_tokens), *_IMAGE),
        seed=seed,
        sentences=sentences,
        whole_words=True,
    )
    written["post_processor"] = _begin_with(_CONTROL[0], spec.base_vocab)
    return written


def tokenizer_config_json(spec: CheckpointSpec) -> dict[str, Any]:
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


def _control_names(count: int) -> list[str]:
    reserved = count - len(_CONTROL)
    return [*_CONTROL, *(f"<|reserved_special_token_{3 + index}|>" for index in range(reserved))]


def _begin_with(name: str, token_id: int) -> dict[str, Any]:
    start = {"SpecialToken": {"id": name, "type_id": 0}}
    first, second = ({"Sequence": {"id": which, "type_id": 0}} for which in ("A", "B"))
    return {
        "type": "TemplateProcessing",
        "single": [start, first],
        "pair": [start, first, start, second],
        "special_tokens": {name: {"id": name, "ids": [token_id], "tokens": [name]}},
    }


def all_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of a checkpoint by canonical name, the encoder's unused pooling head included."""
    hidden, wide = config.vision.hidden, config.vision.intermediate
    head: Shapes = {
        "probe": (1, 1, hidden),
        "attention.in_proj_weight": (3 * hidden, hidden),
        "attention.in_proj_bias": (3 * hidden,),
        "attention.out_proj.weight": (hidden, hidden),
        "attention.out_proj.bias": (hidden,),
        "layernorm.weight": (hidden,),
        "layernorm.bias": (hidden,),
        "mlp.fc1.weight": (wide, hidden),
        "mlp.fc1.bias": (wide,),
        "mlp.fc2.weight": (hidden, wide),
        "mlp.fc2.bias": (hidden,),
    }
    return expected(config) | {f"vision.head.{name}": shape for name, shape in head.items()}


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation that keep activations near unit size and different inputs apart."""
    if name.endswith("bias"):
        return 0.0, 0.05
    if "norm" in name or name == "projector.0.weight":
        return 1.0, 0.1
    if name.endswith(("embed_tokens.weight", "position_embedding.weight", "probe")):
        return 0.0, 0.5
    gain = 1.0
    if "patch_embedding" in name:
        gain = 4.0
    elif "q_proj" in name or "k_proj" in name:
        gain = 1.5
    return 0.0, gain / math.sqrt(math.prod(shape[1:]))
