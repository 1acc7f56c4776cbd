"""The shapes of random checkpoints, and the JSON files that go with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
