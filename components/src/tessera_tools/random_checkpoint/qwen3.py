"""Random checkpoints of the Qwen3 families: shapes, files, distributions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from tokenizers import normalizers

from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from tessera.checkpoint.weights import Shapes
from tessera.models.colqwen3.model import OPS, TOMORO
from tessera.models.colqwen3.model import read_config as read_colqwen3_config
from tessera.models.nemotron_colembed_vl.model import SETTINGS_FILE
from tessera.models.nemotron_colembed_vl.model import read_config as read_colembed_config
from tessera.models.qwen3.config import DEFAULT_TASK, END_OF_TEXT
from tessera.models.qwen3_embedding.model import read_config
from tessera.models.qwen3_rerank.model import read_config as read_rerank_config
from tessera.models.qwen3_vl_embedding.config import ModelConfig
from tessera.models.qwen3_vl_embedding.config import read_config as read_vl_config
from tessera.models.qwen3_vl_embedding.tensors import expected as vl_shapes
from tessera.models.qwen3_vl_rerank.model import read_config as read_vl_rerank_config
from tessera.models.two_towers.images import PROCESSOR_FILE
from tessera_tools.random_checkpoint.spec import DecoderSpec, Sizes, declared_json, modules_json, rope_json
from tessera_tools.random_checkpoint.tokenizer import byte_level_bpe, template
from tessera_tools.random_checkpoint.weights import RandomTensor, random_tensors

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>"),
    *("<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>"),
    *("</tool_response>", "<think>", "</think>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Spec(DecoderSpec):
    """A checkpoint of Qwen3-Embedding; the defaults make one that runs on any machine.

    The vocabulary is ``base_vocab`` byte-pair tokens, 26 control tokens that begin with ``<|endoftext|>``,
    and unused ids up to ``vocab_size``. ``appends_end`` says whether the tokenizer's post-processor appends
    ``<|endoftext|>``.
    """

    layers: int = 4
    vocab_size: int = 2048
    max_positions: int = 32768
    theta: float = 1_000_000.0
    rope_key: str = "rope_scaling"
    appends_end: bool = True
    text_prefix: str = "model."

    control = _CONTROL
    prompts: ClassVar[Mapping[str, str]] = {
        "query": f"Instruct: {DEFAULT_TASK}\nQuery:",
        "document": "",
    }

    def files(self, dtype: str, seed: int) -> dict[str, Any]:
        declared = declared_json("lasttoken", self.hidden, prompts=self.prompts)
        return {**self._files(dtype, seed), **declared}

    def _files(self, dtype: str, seed: int) -> dict[str, Any]:
        return {
            CONFIG_FILE: {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "torch_dtype": dtype,
                "tie_word_embeddings": True,
                **self._decoder(),
                "use_sliding_window": False,
                "sliding_window": None,
                "max_window_layers": self.layers,
            },
            TOKENIZER_FILE: self._tokenizer(seed),
            TOKENIZER_CONFIG_FILE: {
                "tokenizer_class": "Qwen2Tokenizer",
                "bos_token": None,
                "eos_token": "<|im_end|>",
                "pad_token": END_OF_TEXT,
                "clean_up_tokenization_spaces": False,
                "model_max_length": 131072,
            },
        }

    def tensors(self, directory: Path) -> Iterator[RandomTensor]:
        config = read_config(Section.read(directory / CONFIG_FILE))
        return _tensors(config.shapes("text."), self._stored())

    def _stored(self) -> dict[str, str]:
        """What stands in the files at the beginnings of canonical names."""
        return {"text.": self.text_prefix}

    def _rope(self) -> dict[str, Any] | None:
        return None

    def _decoder(self) -> dict[str, Any]:
        return {
            **self.decoder_json(1e-6),
            "attention_bias": False,
            "vocab_size": self.vocab_size,
            "bos_token_id": self.base_vocab,
            "eos_token_id": self.base_vocab + 2,
            **rope_json(self.rope_key, self.theta, self._rope()),
        }

    def _tokenizer(self, seed: int) -> dict[str, Any]:
        written = byte_level_bpe(
            size=self.base_vocab, split=_SPLIT, control=_CONTROL, seed=seed, normalizer=normalizers.NFC()
        )
        written["post_processor"] = _post_processor(self.base_vocab, appends_end=self.appends_end)
        return written


Layout = Literal["language model", "modules", "classifier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3RerankSpec(Qwen3Spec):
    """A checkpoint of Qwen3-Reranker in one of its layouts.

    ``language model`` declares nothing of scores, ``modules`` has the files of ``sentence-transformers``, and
    ``classifier`` one row in place of the logits. Without ``tied`` the logits have rows of their own.
    """

    layout: Layout = "modules"
    appends_end: bool = False
    tied: bool = True

    def files(self, dtype: str, seed: int) -> dict[str, Any]:
        files = self._files(dtype, seed)
        return files | _score_files(self, files, classifier="Qwen3ForSequenceClassification")

    def tensors(self, directory: Path) -> Iterator[RandomTensor]:
        text = read_rerank_config(Section.read(directory / CONFIG_FILE))
        return _with_head(self, text.shapes("text."))


def _with_answers(model: dict[str, Any]) -> dict[str, int]:
    """Put yes and no into a vocabulary, in place of the last merges; the files' names of their ids."""
    vocabulary: dict[str, int] = model["vocab"]
    for answer in ("yes", "no"):
        if answer not in vocabulary:
            # What the last merge makes is part of no other.
            vocabulary[answer] = vocabulary.pop("".join(model["merges"].pop()))
    return {"true_token_id": vocabulary["yes"], "false_token_id": vocabulary["no"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLSpec(Qwen3Spec):
    """A checkpoint of Qwen3-VL-Embedding."""

    text_prefix: str = "model.language_model."
    vision_prefix: str = "model.visual."
    theta: float = 5_000_000.0
    max_positions: int = 262144
    sections: tuple[int, int, int] = (6, 5, 5)
    vision_hidden: int = 64
    vision_layers: int = 4
    vision_heads: int = 4
    vision_intermediate: int = 128
    positions: int = 144
    deepstack: tuple[int, ...] = (0, 1, 2)
    max_trained_pixels: int = 1_310_720

    prompts: ClassVar[Mapping[str, str]] = {}

    def _files(self, dtype: str, seed: int) -> dict[str, Any]:
        files = Qwen3Spec._files(self, dtype, seed)
        files[CONFIG_FILE] = {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "torch_dtype": dtype,
            "tie_word_embeddings": True,
            "image_token_id": self.id_of("<|image_pad|>"),
            "video_token_id": self.id_of("<|video_pad|>"),
            "vision_start_token_id": self.id_of("<|vision_start|>"),
            "vision_end_token_id": self.id_of("<|vision_end|>"),
            "text_config": {"model_type": "qwen3_vl_text", **self._decoder()},
            "vision_config": {
                "model_type": "qwen3_vl",
                "hidden_size": self.vision_hidden,
                "intermediate_size": self.vision_intermediate,
                "depth": self.vision_layers,
                "num_heads": self.vision_heads,
                "out_hidden_size": self.hidden,
                "in_channels": 3,
                "patch_size": 16,
                "temporal_patch_size": 2,
                "spatial_merge_size": 2,
                "num_position_embeddings": self.positions,
                "deepstack_visual_indexes": list(self.deepstack),
                "hidden_act": "gelu_pytorch_tanh",
            },
        }
        files[PROCESSOR_FILE] = {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 4096, "longest_edge": self.max_trained_pixels},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
        return files

    def tensors(self, directory: Path) -> Iterator[RandomTensor]:
        return _tensors(vl_shapes(self._read(directory)), self._stored())

    def _stored(self) -> dict[str, str]:
        return {"text.": self.text_prefix, "vision.": self.vision_prefix}

    def _read(self, directory: Path) -> ModelConfig:
        return read_vl_config(directory)

    def _rope(self) -> dict[str, Any]:
        return {"rope_type": "default", "mrope_interleaved": True, "mrope_section": list(self.sections)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ColQwen3Spec(Qwen3VLSpec):
    """A checkpoint of ColQwen3, with the names of Tomoro's; ``ops`` for those of Ops-Colqwen3."""

    text_prefix: str = "vlm.model.language_model."
    vision_prefix: str = "vlm.model.visual."
    appends_end: bool = False
    width: int = 320
    bias: bool = True
    ops: bool = False

    def files(self, dtype: str, seed: int) -> dict[str, Any]:
        files = self._files(dtype, seed)
        if self.ops:
            kind = {"architectures": ["OpsColQwen3Model"], "model_type": OPS, "dims": self.width}
        else:
            kind = {"architectures": ["ColQwen3"], "model_type": TOMORO, "embed_dim": self.width}
        files[CONFIG_FILE] |= kind
        return files

    def tensors(self, directory: Path) -> Iterator[RandomTensor]:
        projection = "custom_text_proj." if self.ops else "embedding_proj_layer."
        for tensor in Qwen3VLSpec.tensors(self, directory):
            part, _, rest = tensor.name.partition("head.")
            if part != self.text_prefix:
                yield tensor
            elif self.bias or rest != "bias":
                yield replace(tensor, name=projection + rest)

    def _read(self, directory: Path) -> ModelConfig:
        return read_colqwen3_config(directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLRerankSpec(Qwen3VLSpec):
    """A checkpoint of Qwen3-VL-Reranker, in the layouts of ``Qwen3RerankSpec``."""

    layout: Layout = "modules"
    appends_end: bool = False
    tied: bool = True

    def files(self, dtype: str, seed: int) -> dict[str, Any]:
        files = self._files(dtype, seed)
        return files | _score_files(self, files, classifier="Qwen3VLForSequenceClassification")

    def tensors(self, directory: Path) -> Iterator[RandomTensor]:
        return _with_head(self, vl_shapes(read_vl_rerank_config(directory)))


# The turns of Qwen3-VL; tools, videos and thoughts have no part in them.
_CHAT: Final = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- for part in message.content %}"
    "{%- if part.type == 'text' %}{{- part.text }}"
    "{%- else %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- endif %}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronColEmbedSpec(Qwen3VLSpec):
    """A checkpoint of Nemotron ColEmbed VL v2, which has logits and a final norm that nothing uses."""

    appends_end: bool = False
    longest_tokens: int = 4096

    def files(self, dtype: str, seed: int) -> dict[str, Any]:
        files = self._files(dtype, seed)
        files[CONFIG_FILE] |= {
            "architectures": ["Qwen3VLNemotronEmbedModel"],
            "model_type": "qwen3_vl_nemotron_embed",
            "pooling": "colbert",
            "tie_word_embeddings": False,
        }
        files[TOKENIZER_CONFIG_FILE]["chat_template"] = _CHAT
        files[SETTINGS_FILE] = {
            "processor_class": "Qwen3VLNemotronEmbedProcessor",
            "q_max_length": 512,
            "p_max_length": self.longest_tokens,
            "query_prefix": "query:",
            "passage_prefix": "passage:",
        }
        return files

    def tensors(self, directory: Path) -> Iterator[RandomTensor]:
        shapes = vl_shapes(self._read(directory)) | {"text.norm.weight": (self.hidden,)}
        yield from _tensors(shapes, self._stored())
        yield _head("lm_head.weight", self.vocab_size, self.hidden)

    def _read(self, directory: Path) -> ModelConfig:
        return read_colembed_config(directory)


TINY = Qwen3Spec()
VL_TINY = Qwen3VLSpec()

_PUBLISHED: Final[Mapping[str, Any]] = {
    "hidden": 1024,
    "layers": 28,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "intermediate": 3072,
    "base_vocab": 151643,
    "vocab_size": 151669,
}
FULL = Qwen3Spec(**_PUBLISHED)
_VL: Final[Mapping[str, Any]] = {
    "kv_heads": 8,
    "head_dim": 128,
    "base_vocab": 151643,
    "vocab_size": 151936,
    "sections": (24, 20, 20),
    "vision_hidden": 1024,
    "vision_layers": 24,
    "vision_heads": 16,
    "vision_intermediate": 4096,
    "positions": 2304,
    "deepstack": (5, 11, 17),
}
VL_FULL = Qwen3VLSpec(hidden=2048, layers=28, heads=16, intermediate=6144, **_VL)
COL_TINY = ColQwen3Spec()
COL_FULL = ColQwen3Spec(hidden=2560, layers=36, heads=32, intermediate=9728, shards=2, **_VL)
COLEMBED_TINY = NemotronColEmbedSpec()
COLEMBED_FULL = NemotronColEmbedSpec(hidden=2560, layers=36, heads=32, intermediate=9728, shards=2, **_VL)
RERANK_TINY = Qwen3RerankSpec()
RERANK_FULL = Qwen3RerankSpec(**_PUBLISHED)
VL_RERANK_TINY = Qwen3VLRerankSpec()
VL_RERANK_FULL = Qwen3VLRerankSpec(hidden=2048, layers=28, heads=16, intermediate=6144, **_VL)

SIZES: Final = Sizes(tiny=TINY, full=FULL)
RERANK_SIZES: Final = Sizes(tiny=RERANK_TINY, full=RERANK_FULL)
VL_SIZES: Final = Sizes(tiny=VL_TINY, full=VL_FULL)
VL_RERANK_SIZES: Final = Sizes(tiny=VL_RERANK_TINY, full=VL_RERANK_FULL)
COL_SIZES: Final = Sizes(tiny=COL_TINY, full=COL_FULL)
COLEMBED_SIZES: Final = Sizes(tiny=COLEMBED_TINY, full=COLEMBED_FULL)


def _score_files(
    spec: Qwen3RerankSpec | Qwen3VLRerankSpec, files: dict[str, Any], *, classifier: str
) -> dict[str, Any]:
    """The files that make a score, and what others say of it."""
    files[CONFIG_FILE]["tie_word_embeddings"] = spec.tied
    answers = _with_answers(files[TOKENIZER_FILE]["model"])
    if spec.layout == "classifier":
        files[CONFIG_FILE] |= {"architectures": [classifier], "id2label": {"0": "LABEL_0"}}
    if spec.layout != "modules":
        return {}
    kinds = ("base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore")
    return {
        "modules.json": modules_json(f"sentence_transformers.{kind}" for kind in kinds),
        "1_LogitScore/config.json": answers,
        "sentence_bert_config.json": {"transformer_task": "text-generation"},
        "config_sentence_transformers.json": {"model_type": "CrossEncoder"},
    }


def _with_head(spec: Qwen3RerankSpec | Qwen3VLRerankSpec, shapes: Shapes) -> Iterator[RandomTensor]:
    body = {name: shape for name, shape in shapes.items() if ".head." not in name}
    yield from _tensors(body, spec._stored())
    if spec.layout == "classifier":
        yield _head("score.weight", 1, spec.hidden)
    elif not spec.tied:
        yield _head("lm_head.weight", spec.vocab_size, spec.hidden)


def _head(name: str, rows: int, hidden: int) -> RandomTensor:
    return RandomTensor(name=name, shape=(rows, hidden), mean=0.0, deviation=0.5)


def _post_processor(end: int, *, appends_end: bool) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    if not appends_end:
        return byte_level
    last = END_OF_TEXT
    appending = template(("A", last), ("A", last, "B", last), {last: end})
    return {"type": "Sequence", "processors": [byte_level, appending]}


def _tensors(shapes: Shapes, stored: Mapping[str, str]) -> Iterator[RandomTensor]:
    return random_tensors(dict(sorted(shapes.items())), _distribution, stored)  # in the published order


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation that let every part of the forward pass show in the vectors.

    The two forms of GELU differ by 0.0005 at most, where they are near 0.01. So the vision tower's networks
    work there: with inputs around 0, one form for the other leaves the cosine of two vectors above 0.9999999.
    """
    if name.endswith("linear_fc1.bias"):
        return -2.75, 0.2
    if name.endswith("bias"):
        return 0.0, 0.2
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 1.5, 0.4
    if "norm" in name:
        return 1.0, 0.3
    if name.endswith(("embed_tokens.weight", "pos_embed.weight")):
        return 0.0, 0.5
    gain = 1.0
    if "patch_embed" in name:
        gain = 4.0
    elif name.endswith(("attn.qkv.weight", "o_proj.weight", "attn.proj.weight")):
        gain = 2.0
    elif name.endswith("linear_fc1.weight"):
        gain = 0.4
    elif name.endswith("linear_fc2.weight"):
        gain = 60.0
    return 0.0, gain / math.sqrt(math.prod(shape[1:]))
