"""Random checkpoints of what has Ministral 3's decoder: shapes, files, distributions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from tokenizers import normalizers

from tessera.checkpoint.declared import read_declared
from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from tessera.models.ministral3.config import read_text, with_defaults
from tessera.models.nemotron_3_5_embed.config import SETTINGS_FILE, read_config
from tessera.models.two_towers.images import CLIP_MEAN, CLIP_STD, PROCESSOR_FILE
from tessera_tools.random_checkpoint.llama import distribution
from tessera_tools.random_checkpoint.spec import DecoderSpec, Sizes, declared_json
from tessera_tools.random_checkpoint.tokenizer import byte_level_bpe, template
from tessera_tools.random_checkpoint.weights import RandomTensor, random_tensors

# Mistral's Tekken.
_SPLIT: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL: Final = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
)

YARN: Final[Mapping[str, Any]] = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "max_position_embeddings": 262144,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

Marks = Literal["none", "bos", "bos and eos"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nemotron3Spec(DecoderSpec):
    """A checkpoint of Nemotron-3-Embed; the defaults make one that runs on any machine.

    The vocabulary is ``base_vocab`` byte-pair tokens and 14 control tokens that begin with ``<unk>``.
    ``marks`` are what the tokenizer's post-processor adds. Short inputs of the small one are beyond the
    original context, where scaling shows. ``declares`` says whether ``modules.json`` is there.
    """

    max_positions: int = 262144
    rope: Mapping[str, Any] = field(default_factory=lambda: {**YARN, "original_max_position_embeddings": 64})
    causal: bool = False
    pooling: str | None = "avg"
    marks: Marks = "bos"
    declares: bool = True

    control = _CONTROL
    prompts: ClassVar[Mapping[str, str]] = {"query": "query: ", "document": "passage: "}

    @property
    def vocab_size(self) -> int:
        return self.base_vocab + len(_CONTROL)

    def files(self, dtype: str, seed: int) -> dict[str, Any]:
        declared = declared_json("mean_tokens", self.hidden, prompts=self.prompts) if self.declares else {}
        return {**self._files(dtype, seed), **declared}

    def _files(self, dtype: str, seed: int) -> dict[str, Any]:
        return {
            CONFIG_FILE: {
                "architectures": ["Ministral3Model"],
                "dtype": dtype,
                **self._decoder(),
                **({} if self.pooling is None else {"pooling": self.pooling}),
            },
            TOKENIZER_FILE: self._tokenizer(seed),
            TOKENIZER_CONFIG_FILE: {
                "tokenizer_class": "TokenizersBackend",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "pad_token": "<pad>",
                "clean_up_tokenization_spaces": False,
                "model_max_length": 32768,
            },
        }

    def tensors(self, directory: Path) -> Iterator[RandomTensor]:
        text = read_text(with_defaults(Section.read(directory / CONFIG_FILE)), pooling="mean")
        return random_tensors(text.shapes(), distribution, {"": self.text_prefix})

    def _decoder(self) -> dict[str, Any]:
        return {
            "model_type": "ministral3",
            **self.decoder_json(1e-5),
            "sliding_window": None,
            "vocab_size": self.vocab_size,
            "bos_token_id": self.id_of("<s>"),
            "eos_token_id": self.id_of("</s>"),
            "pad_token_id": self.id_of("<pad>"),
            "tie_word_embeddings": False,
            "is_causal": self.causal,
            "rope_parameters": dict(self.rope),
        }

    def _normalizer(self) -> normalizers.Normalizer | None:
        return None

    def _tokenizer(self, seed: int) -> dict[str, Any]:
        written = byte_level_bpe(
            size=self.base_vocab,
            split=_SPLIT,
            control=_CONTROL,
            seed=seed,
            whole_words=True,
            normalizer=self._normalizer(),
        )
        before = ["<s>"] if self.marks != "none" else []
        behind = ["</s>"] if self.marks == "bos and eos" else []
        added = {name: self.id_of(name) for name in (*before, *behind)}
        written["post_processor"] = template((*before, "A", *behind), ("A", "B"), added)
        return written


# Like that of NVIDIA's training code: images before the text, system message as its prefix, and a mark behind
# each beginning of a control token in a client's text, which the normalizer takes away again.
_CHAT: Final = (
    "{%- for message in messages %}{%- if message.role == 'system' %}"
    "{%- for part in message.content %}{{- part.text }}{%- endfor %}{{- ' ' }}"
    "{%- else %}{%- set seen = namespace(any=false) %}"
    "{%- for part in message.content if part.type == 'image' %}"
    "{%- if seen.any %}{{- ' ' }}{%- endif %}{{- '[IMG]' }}{%- set seen.any = true %}{%- endfor %}"
    "{%- for part in message.content if part.type == 'text' %}"
    "{%- if seen.any %}{{- ' ' }}{%- endif %}"
    "{{- part.text | replace('[', '[\u200c') | replace('<', '<\u200c') }}"
    "{%- set seen.any = true %}{%- endfor %}"
    "{%- endif %}{%- endfor %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nemotron35Spec(Nemotron3Spec):
    """A checkpoint of Nemotron-3.5-Embed; images have sides of up to ``longest_edge`` pixels."""

    text_prefix: str = "language_model."
    marks: Marks = "none"
    vision_hidden: int = 64
    vision_layers: int = 2
    vision_heads: int = 2
    vision_intermediate: int = 128
    vision_activation: str = "silu"
    patch_size: int = 14
    longest_edge: int = 560
    projector_bias: bool = False
    nested_processor: bool = False

    prompts: ClassVar[Mapping[str, str]] = {"query": "query:", "document": "passage:"}

    def files(self, dtype: str, seed: int) -> dict[str, Any]:
        files = Nemotron3Spec.files(self, dtype, seed)
        files[CONFIG_FILE] = {
            "architectures": ["Mistral3Model"],
            "model_type": "mistral3",
            "dtype": dtype,
            "image_token_index": self.id_of("[IMG]"),
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": self.projector_bias,
            "text_config": self._decoder(),
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": self.vision_hidden,
                "intermediate_size": self.vision_intermediate,
                "num_hidden_layers": self.vision_layers,
                "num_attention_heads": self.vision_heads,
                "head_dim": self.vision_hidden // self.vision_heads,
                "num_channels": 3,
                "image_size": self.longest_edge,
                "patch_size": self.patch_size,
                "hidden_act": self.vision_activation,
                "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "axial"},
            },
        }
        if self.pooling is not None and not self.declares:
            files[CONFIG_FILE]["pooling"] = self.pooling
        files[TOKENIZER_CONFIG_FILE]["chat_template"] = _CHAT
        processor = {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": self.longest_edge},
            "patch_size": {"height": self.patch_size, "width": self.patch_size},
            "resample": 3,
            "image_mean": list(CLIP_MEAN),
            "image_std": list(CLIP_STD),
        }
        settings: dict[str, Any] = {
            "processor_class": "PixtralProcessor",
            "patch_size": self.patch_size,
            "spatial_merge_size": 2,
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        }
        if self.nested_processor:
            settings["image_processor"] = processor
        else:
            files[PROCESSOR_FILE] = processor
        return {**files, SETTINGS_FILE: settings}

    def tensors(self, directory: Path) -> Iterator[RandomTensor]:
        config = read_config(directory, read_declared(directory), pooling="avg", longest_edge=0)
        stored = {
            "vision.projector.": "multi_modal_projector.",
            "vision.": "vision_tower.",
            "text.": self.text_prefix,
        }
        shapes = config.vision.shapes() | config.text.shapes("text.")
        return random_tensors(shapes, distribution, stored)

    def _normalizer(self) -> normalizers.Normalizer:
        return normalizers.Sequence(
            [normalizers.Replace(f"{sign}\u200c", sign) for sign in ("[", "<")]  # what the template adds
        )


TINY = Nemotron3Spec()
VL_TINY = Nemotron35Spec()

# 1,140,918,272 numbers, as the published 1B has.
PUBLISHED: Final[Mapping[str, Any]] = {
    "hidden": 2048,
    "layers": 16,
    "heads": 24,
    "kv_heads": 8,
    "head_dim": 128,
    "intermediate": 6144,
    "base_vocab": 131_072 - len(_CONTROL),
    "rope": YARN,
}
FULL = Nemotron3Spec(**PUBLISHED)

SIZES: Final = Sizes(tiny=TINY, full=FULL)

# 413,792,256 numbers in the tower and the projector.
VL_FULL = Nemotron35Spec(
    **PUBLISHED,
    vision_hidden=1024,
    vision_layers=24,
    vision_heads=16,
    vision_intermediate=4096,
    longest_edge=1540,
)
VL_SIZES: Final = Sizes(tiny=VL_TINY, full=VL_FULL)
