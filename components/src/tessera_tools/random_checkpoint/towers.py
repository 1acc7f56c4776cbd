"""Random checkpoints of two towers: CLIP, SigLIP and SigLIP 2."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from tokenizers import Regex, normalizers

from tessera.checkpoint.section import CONFIG_FILE
from tessera.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from tessera.checkpoint.weights import Shapes
from tessera.models.two_towers.images import CLIP_MEAN, CLIP_STD, HALF, PROCESSOR_FILE
from tessera_tools.random_checkpoint.pieces import ROBERTA, unigram
from tessera_tools.random_checkpoint.spec import Sizes
from tessera_tools.random_checkpoint.tokenizer import byte_level_bpe, template
from tessera_tools.random_checkpoint.weights import (
    RandomTensor,
    norm_shapes,
    product_shapes,
    random_tensors,
)

_SPLIT: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """The layers of one tower."""

    hidden: int
    layers: int
    heads: int
    intermediate: int

    def config(self, activation: str, eps: float) -> dict[str, Any]:
        """Its part of ``config.json``, without what is the tower's own."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.intermediate,
            "hidden_act": activation,
            "layer_norm_eps": eps,
        }

    def shapes(self, part: str) -> Shapes:
        """Its layers' tensors below ``part``."""
        hidden, wide = self.hidden, self.intermediate
        shapes: Shapes = {}
        for number in range(self.layers):
            layer = f"{part}.encoder.layers.{number}"
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                shapes |= product_shapes(f"{layer}.self_attn.{name}", hidden, hidden)
            shapes |= norm_shapes(f"{layer}.layer_norm1", hidden) | norm_shapes(
                f"{layer}.layer_norm2", hidden
            )
            shapes |= product_shapes(f"{layer}.mlp.fc1", hidden, wide) | product_shapes(
                f"{layer}.mlp.fc2", wide, hidden
            )
        return shapes


_SMALL: Final = Tower(hidden=64, layers=2, heads=2, intermediate=128)
_WIDE: Final = Tower(hidden=96, layers=3, heads=2, intermediate=160)
_BASE: Final = Tower(hidden=768, layers=12, heads=12, intermediate=3072)
_LARGE: Final = Tower(hidden=1024, layers=24, heads=16, intermediate=4096)
_SO400M: Final = Tower(hidden=1152, layers=27, heads=16, intermediate=4304)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowersSpec:
    """What checkpoints of two towers have in common; ``width`` is that of the vectors."""

    text: Tower = _SMALL
    vision: Tower = _WIDE
    width: int = 48
    vocab_size: int = 1000
    image_size: int = 64
    patch_size: int = 16
    activation: str = "gelu_pytorch_tanh"
    shards: int = 1

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    longest: ClassVar[int]

    def tensors(self, directory: Path) -> Iterator[RandomTensor]:
        return random_tensors(self.shapes(), _distribution)

    def shapes(self) -> Shapes:
        """Every stored tensor."""
        raise NotImplementedError

    def text_shapes(self) -> Shapes:
        """Those of the text tower, but for what is behind its norm."""
        hidden = self.text.hidden
        return {
            "text_model.embeddings.token_embedding.weight": (self.vocab_size, hidden),
            "text_model.embeddings.position_embedding.weight": (self.longest, hidden),
            **self.text.shapes("text_model"),
            **norm_shapes("text_model.final_layer_norm", hidden),
        }

    def named(self, dtype: str) -> dict[str, Any]:
        """What ``config.json`` says of the model as a whole."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "torch_dtype": dtype,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSpec(TowersSpec):
    """A checkpoint of CLIP; ``end`` is the end token of ``config.json``, None for the true one.

    Files of the first years say 2 there.
    """

    activation: str = "quick_gelu"
    end: int | None = None

    model_type: ClassVar[str] = "clip"
    architecture: ClassVar[str] = "CLIPModel"
    longest: ClassVar[int] = 77
    marks: ClassVar[tuple[str, ...]] = ("<|startoftext|>", "<|endoftext|>")

    def files(self, dtype: str, seed: int) -> dict[str, Any]:
        first, last = self.marks
        first_id = self.vocab_size - 2
        return {
            CONFIG_FILE: {
                **self.named(dtype),
                "projection_dim": self.width,
                "logit_scale_init_value": 2.6592,
                "text_config": {
                    "model_type": "clip_text_model",
                    "vocab_size": self.vocab_size,
                    "max_position_embeddings": self.longest,
                    "bos_token_id": first_id,
                    "eos_token_id": first_id + 1 if self.end is None else self.end,
                    "pad_token_id": 1,
                    "projection_dim": self.width,
                    **self.text.config(self.activation, 1e-5),
                },
                "vision_config": {
                    "model_type": "clip_vision_model",
                    "image_size": self.image_size,
                    "patch_size": self.patch_size,
                    "projection_dim": self.width,
                    **self.vision.config(self.activation, 1e-5),
                },
            },
            TOKENIZER_FILE: self._tokenizer(seed),
            TOKENIZER_CONFIG_FILE: {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": first,
                "eos_token": last,
                "pad_token": last,
                "unk_token": last,
                "model_max_length": self.longest,
            },
            PROCESSOR_FILE: _processor(
                "CLIPImageProcessor",
                CLIP_MEAN,
                CLIP_STD,
                size={"shortest_edge": self.image_size},
                do_center_crop=True,
                crop_size={"height": self.image_size, "width": self.image_size},
                resample=3,
                do_convert_rgb=True,
            ),
        }

    def _tokenizer(self, seed: int) -> dict[str, Any]:
        first, last = self.marks
        steps = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        size = self.vocab_size - len(self.marks)
        written = byte_level_bpe(
            size=size,
            split=_SPLIT,
            control=self.marks,
            seed=seed,
            normalizer=normalizers.Sequence(steps),
        )
        written["post_processor"] = {
            "type": "RobertaProcessing",
            "sep": [last, size + 1],
            "cls": [first, size],
            "trim_offsets": False,
            "add_prefix_space": False,
        }
        return written

    def shapes(self) -> Shapes:
        text, vision = self.text.hidden, self.vision.hidden
        patches = (self.image_size // self.patch_size) ** 2
        return {
            "logit_scale": (),
            **self.text_shapes(),
            "vision_model.embeddings.class_embedding": (vision,),
            "vision_model.embeddings.patch_embedding.weight": (vision, 3, self.patch_size, self.patch_size),
            "vision_model.embeddings.position_embedding.weight": (patches + 1, vision),
            **norm_shapes("vision_model.pre_layrnorm", vision),
            **self.vision.shapes("vision_model"),
            **norm_shapes("vision_model.post_layernorm", vision),
            "visual_projection.weight": (self.width, vision),
            "text_projection.weight": (self.width, text),
        }


def _processor(kind: str, mean: Sequence[float], deviation: Sequence[float], **own: Any) -> dict[str, Any]:
    """``preprocessor_config.json`` of a processor that resizes images and normalises them."""
    return {
        "image_processor_type": kind,
        "do_resize": True,
        **own,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(deviation),
    }


def pooling_head_shapes(part: str, hidden: int, intermediate: int) -> Shapes:
    """The tensors of SigLIP's pooling head below ``part``: one query attends to all patches."""
    return {
        f"{part}.probe": (1, 1, hidden),
        f"{part}.attention.in_proj_weight": (3 * hidden, hidden),
        f"{part}.attention.in_proj_bias": (3 * hidden,),
        **product_shapes(f"{part}.attention.out_proj", hidden, hidden),
        **norm_shapes(f"{part}.layernorm", hidden),
        **product_shapes(f"{part}.mlp.fc1", hidden, intermediate),
        **product_shapes(f"{part}.mlp.fc2", intermediate, hidden),
    }


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and deviation that show a mistake: norms and biases are far from trivial."""
    if "norm" in name:
        return (1.0, 0.2) if name.endswith("weight") else (0.0, 0.2)
    if name.endswith("bias") or name.startswith("logit"):
        return 0.0, 0.2
    if "patch_embedding" in name:
        return 0.0, 1.0 / math.sqrt(math.prod(shape[1:]))
    if "embedding" in name or name.endswith("probe"):
        return 0.0, 0.5
    gain = 2.0 if ".q_proj." in name or ".k_proj." in name else 1.0
    return 0.0, gain / math.sqrt(shape[1])


CLIP_TINY: Final = ClipSpec()
CLIP_FULL: Final = ClipSpec(
    text=_BASE,
    vision=_LARGE,
    width=768,
    vocab_size=49_408,
    image_size=224,
    patch_size=14,
)
CLIP_SIZES: Final = Sizes(tiny=CLIP_TINY, full=CLIP_FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipSpec(TowersSpec):
    """A checkpoint of SigLIP; with ``bytes_vocabulary`` one of SigLIP 2, whose vocabulary is Gemma's.

    Vectors are as wide as the vision tower's rows.
    """

    width: int = 96
    bytes_vocabulary: bool = False
    resample: int = 3

    model_type: ClassVar[str] = "siglip"
    architecture: ClassVar[str] = "SiglipModel"
    longest: ClassVar[int] = 64
    marks: ClassVar[tuple[str, ...]] = ("<pad>", "<eos>", "<bos>", "<unk>")

    def files(self, dtype: str, seed: int) -> dict[str, Any]:
        pad, end = self.marks[:2] if self.bytes_vocabulary else (ROBERTA[1], ROBERTA[2])
        return {
            CONFIG_FILE: {
                **self.named(dtype),
                "text_config": {
                    "model_type": f"{self.model_type}_text_model",
                    "vocab_size": self.vocab_size,
                    "max_position_embeddings": self.longest,
                    "projection_size": self.width,
                    **self.text.config(self.activation, 1e-6),
                },
                "vision_config": {
                    "model_type": f"{self.model_type}_vision_model",
                    "patch_size": self.patch_size,
                    **self.positions(),
                    **self.vision.config(self.activation, 1e-6),
                },
            },
            TOKENIZER_FILE: self._tokenizer(seed),
            TOKENIZER_CONFIG_FILE: {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": end,
                "pad_token": pad,
                "model_max_length": self.longest,
            },
            PROCESSOR_FILE: self.processor(),
        }

    def positions(self) -> dict[str, Any]:
        """What ``config.json`` says of the positions of patches."""
        return {"image_size": self.image_size}

    def _tokenizer(self, seed: int) -> dict[str, Any]:
        if not self.bytes_vocabulary:
            return unigram(self.vocab_size)
        size = self.vocab_size - len(self.marks)
        written = byte_level_bpe(size=size, split=_SPLIT, control=self.marks, seed=seed)
        end = self.marks[1]
        written["post_processor"] = template(("A", end), ("A", "B"), {end: size + 1})
        return written

    def processor(self) -> dict[str, Any]:
        """``preprocessor_config.json``."""
        square = {"height": self.image_size, "width": self.image_size}
        return _processor("SiglipImageProcessor", HALF, HALF, size=square, resample=self.resample)

    def shapes(self) -> Shapes:
        text, vision = self.text.hidden, self.vision.hidden
        side = self.image_size // self.patch_size
        return {
            "logit_scale": (1,),
            "logit_bias": (1,),
            **self.text_shapes(),
            **product_shapes("text_model.head", text, self.width),
            "vision_model.embeddings.patch_embedding.weight": self.patch_shape(),
            "vision_model.embeddings.patch_embedding.bias": (vision,),
            "vision_model.embeddings.position_embedding.weight": (side**2, vision),
            **self.vision.shapes("vision_model"),
            **norm_shapes("vision_model.post_layernorm", vision),
            **pooling_head_shapes("vision_model.head", vision, self.vision.intermediate),
        }

    def patch_shape(self) -> tuple[int, ...]:
        """The shape of the product that patches go through."""
        return (self.vision.hidden, 3, self.patch_size, self.patch_size)


SIGLIP_TINY: Final = SiglipSpec()
_SIGLIP: Final[Mapping[str, Any]] = {
    "text": _SO400M,
    "vision": _SO400M,
    "width": 1152,
    "vocab_size": 256_000,
}
SIGLIP_FULL: Final = SiglipSpec(
    **_SIGLIP,
    image_size=384,
    patch_size=14,
    resample=2,
    bytes_vocabulary=True,
)
SIGLIP_SIZES: Final = Sizes(tiny=SIGLIP_TINY, full=SIGLIP_FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Siglip2Spec(SiglipSpec):
    """A checkpoint of SigLIP 2 NaFlex; ``image_size`` is that of the square with learned positions."""

    bytes_vocabulary: bool = True
    resample: int = 2
    most_patches: int = 24

    model_type: ClassVar[str] = "siglip2"
    architecture: ClassVar[str] = "Siglip2Model"

    def positions(self) -> dict[str, Any]:
        return {"num_patches": (self.image_size // self.patch_size) ** 2}

    def processor(self) -> dict[str, Any]:
        own = {"patch_size": self.patch_size, "max_num_patches": self.most_patches}
        return _processor("Siglip2ImageProcessor", HALF, HALF, resample=self.resample, **own)

    def patch_shape(self) -> tuple[int, ...]:
        return (self.vision.hidden, 3 * self.patch_size**2)


SIGLIP2_TINY: Final = Siglip2Spec()
SIGLIP2_FULL: Final = Siglip2Spec(**_SIGLIP, image_size=256, most_patches=256)
SIGLIP2_SIZES: Final = Sizes(tiny=SIGLIP2_TINY, full=SIGLIP2_FULL)
