"""Random checkpoints of Llama Nemotron Embed VL and of what has its towers: shapes, files, distributions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from tessera.checkpoint.section import CONFIG_FILE
from tessera.checkpoint.weights import Shapes
from tessera.models.base import OutputKind
from tessera.models.llama.config import SCORING
from tessera.models.llama_nemotron_vl.config import PROCESSOR_FILE, ModelConfig, read_config
from tessera.models.llama_nemotron_vl.tensors import expected
from tessera_tools.random_checkpoint.llama import (
    PUBLISHED,
    LlamaSpec,
    backbone_json,
    distribution,
)
from tessera_tools.random_checkpoint.spec import Sizes
from tessera_tools.random_checkpoint.towers import pooling_head_shapes
from tessera_tools.random_checkpoint.weights import RandomTensor, random_tensors

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec(LlamaSpec):
    """What to write; the defaults make a checkpoint that runs on any machine.

    The vocabulary is ``base_vocab`` byte-pair tokens, ``control_tokens`` tokens that begin with
    ``<|begin_of_text|>``, and ten tokens that begin with ``<img>``, in that order of ids.
    """

    marks: ClassVar[tuple[str, ...]] = _IMAGE

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
    max_input_tiles: int = 6
    dynamic_image_size: bool = True
    use_thumbnail: bool = True
    p_max_length: int | None = 10240
    vision_prefix: str = "vision_model.vision_model."
    projector_prefix: str = "mlp1."
    text_prefix: str = "language_model."
    output: OutputKind = OutputKind.VECTOR
    temperature: float = 1.0

    @property
    def image_start_id(self) -> int:
        return self.base_vocab + self.control_tokens

    @property
    def tokens_per_tile(self) -> int:
        return (self.image_size // self.patch_size // self.downsample_factor) ** 2

    def files(self, dtype: str, seed: int) -> dict[str, dict[str, Any]]:
        own = {CONFIG_FILE: config_json(self, dtype), PROCESSOR_FILE: processor_json(self)}
        return LlamaSpec.files(self, dtype, seed) | own

    def tensors(self, directory: Path) -> Iterator[RandomTensor]:
        stored = {
            "vision.": self.vision_prefix,
            "projector.": self.projector_prefix,
            "text.head.weight": "score.weight",
            "text.": self.text_prefix,
        }
        return random_tensors(all_shapes(read_config(directory, self.output)), distribution, stored)


_KINDS: Final[Mapping[OutputKind, Mapping[str, Any]]] = {
    OutputKind.VECTOR: {"architectures": ["LlamaNemotronVLModel"], "model_type": "llama_nemotron_vl"},
    OutputKind.SCORE: {
        "architectures": ["LlamaNemotronVLForSequenceClassification"],
        "model_type": "llama_nemotron_vl_rerank",
    },
    OutputKind.TOKENS: {
        "architectures": ["LlamaNemotronColEmbedVLModel"],
        "model_type": "llama_nemotron_vl",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankSpec(CheckpointSpec):
    """A checkpoint of Llama Nemotron Rerank VL, whose vocabulary has one token more."""

    marks: ClassVar[tuple[str, ...]] = (*_IMAGE, "<pad>")

    output: OutputKind = OutputKind.SCORE
    vision_prefix: str = "model.vision_model.vision_model."
    projector_prefix: str = "model.mlp1."
    text_prefix: str = "model.language_model."


TINY = CheckpointSpec()

_PUBLISHED: Final[Mapping[str, Any]] = {
    "vision_hidden": 1152,
    "vision_layers": 27,
    "vision_heads": 16,
    "vision_intermediate": 4304,
    **PUBLISHED,
}
FULL = CheckpointSpec(**_PUBLISHED)

COLEMBED_TINY = CheckpointSpec(output=OutputKind.TOKENS, pooling="colbert")
COLEMBED_FULL = CheckpointSpec(
    output=OutputKind.TOKENS,
    pooling="colbert",
    vision_hidden=1536,
    vision_layers=40,
    vision_heads=16,
    vision_intermediate=6144,
    hidden=3072,
    layers=28,
    heads=24,
    kv_heads=8,
    head_dim=128,
    intermediate=8192,
    base_vocab=128000,
    control_tokens=256,
    shards=2,
)

RERANK_TINY = RerankSpec()
RERANK_FULL = RerankSpec(**_PUBLISHED)


SIZES: Final = Sizes(tiny=TINY, full=FULL)
COLEMBED_SIZES: Final = Sizes(tiny=COLEMBED_TINY, full=COLEMBED_FULL)
RERANK_SIZES: Final = Sizes(tiny=RERANK_TINY, full=RERANK_FULL)


def config_json(spec: CheckpointSpec, dtype: str) -> dict[str, Any]:
    """``config.json``, its stale tile limit included."""
    optional: dict[str, Any] = {}
    scores = spec.output is OutputKind.SCORE
    if scores:
        optional |= {"temperature": spec.temperature, "id2label": {"0": "LABEL_0"}, "prompt_template": "v1"}
    if spec.dimensions:
        optional["matryoshka_dimensions"] = list(spec.dimensions)
    if spec.p_max_length is not None:
        optional["p_max_length"] = spec.p_max_length
    return {
        "torch_dtype": dtype,
        **_KINDS[spec.output],
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
        "llm_config": backbone_json(spec) | ({"architectures": [SCORING]} if scores else {}),
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


def all_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of a checkpoint by canonical name, the encoder's unused pooling head included."""
    layer = config.vision.layer
    return expected(config) | pooling_head_shapes("vision.head", layer.hidden, layer.intermediate)
