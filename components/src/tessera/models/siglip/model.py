"""A checkpoint of SigLIP as the rest of Tessera sees it; importing and opening need no torch.

The prompt of a text: the text, its end token, and padding up to the fixed length that the tower was trained
with. Attention sees the padding, and the state of the last token of all is pooled.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
from tokenizers import Regex, models, normalizers

from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.checkpoint.tokenizer import PlainTokenizer, token_name
from tessera.checkpoint.tokenizer_class import tokenizer_class
from tessera.checkpoint.weights import Shapes
from tessera.models.base import Content, Family, Prompt, Truncate
from tessera.models.marks import Marks
from tessera.models.options import OptionsFamily
from tessera.models.two_towers.config import (
    BASE,
    Defaults,
    VisionConfig,
    check_channels,
    read_layer,
    read_sizes,
    tower_section,
)
from tessera.models.two_towers.images import (
    HALF,
    read_processing,
    read_processor,
    read_tiling,
)
from tessera.models.two_towers.model import TiledTowers, TwoTowers
from tessera.models.two_towers.tensors import pool_shapes, stack_shapes
from tessera.nn.spec import CHANNELS, EncoderSpec, HeadSpec

Texts = Literal["auto", "canonical", "lower", "as_is"]

_DEFAULTS: Final = Defaults(activation="gelu_pytorch_tanh", eps=1e-6, sizes=BASE)
# The 32 marks of ASCII, as Python's ``string.punctuation`` lists them.
_PUNCTUATION: Final = r"[!-/:-@\[-`{-~]"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``texts`` says what becomes of a text before it is tokenised."""

    texts: Texts = "auto"


class SiglipTexts(TwoTowers):
    """Base of families with SigLIP's text tower."""

    def read_tokenizer(self, path: Path, text: EncoderSpec, texts: Texts) -> PlainTokenizer:
        """Read the tokenizer, and the tokens behind every text; raises ``CheckpointError``.

        "canonical" makes texts lower case, without the punctuation of ASCII, and with single spaces, as
        the tokenizer of SigLIP does, "lower" lower case as that of SigLIP 2. "auto" goes by the kind of
        the vocabulary: Unigram's is SigLIP's.
        """
        tokenizer = PlainTokenizer.read(path, vocab_size=text.vocab_size)
        if texts == "auto":
            texts = "canonical" if isinstance(tokenizer.tokenizer.model, models.Unigram) else "lower"
        steps: list[normalizers.Normalizer] = []
        if texts != "as_is":
            steps.append(normalizers.Lowercase())
        if texts == "canonical":
            steps.append(normalizers.Replace(Regex(_PUNCTUATION), ""))
            steps.append(normalizers.Replace(Regex(r"\s+"), " "))
            steps.append(normalizers.Strip())
        if (given := tokenizer.tokenizer.normalizer) is not None:
            steps.append(given)
        if steps:
            tokenizer.tokenizer.normalizer = normalizers.Sequence(steps)
        # That class has a default; those of other vocabularies have others.
        usual = "</s>" if tokenizer_class(path) == "SiglipTokenizer" else ""
        self.marks = Marks(behind=(tokenizer.id_of(token_name(path, "eos_token", usual)),))
        self._pad = tokenizer.id_of(token_name(path, "pad_token", usual))
        return replace(tokenizer, words=None)

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """The shape of one patch in the product that patches go through."""
        return CHANNELS, self.config.patch_size, self.config.patch_size

    def vision_shapes(self) -> Shapes:
        vision = self.config
        hidden = vision.layer.hidden
        return {
            "vision.patches.projection.weight": (hidden, *self.patch_shape),
            "vision.patches.projection.bias": (hidden,),
            "vision.embed_positions.weight": (vision.grid**2, hidden),
            **stack_shapes(vision.layer, vision.layers),
            **pool_shapes(vision.layer),
        }

    def prompt(self, content: Content, *, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        """As the base; texts and token ids are padded."""
        made = super().prompt(content, max_tokens=max_tokens, truncate=truncate, param=param)
        if content.images:
            return made
        assert isinstance(self.text, EncoderSpec)
        tokens = np.full(self.text.positions, self._pad, np.int32)
        tokens[: len(made.tokens)] = made.tokens
        return replace(made, tokens=tokens)


class Siglip(TiledTowers, SiglipTexts):
    """Implements ``tessera.models.base.Model``."""

    family = "siglip"
    vision_class = "tessera.models.siglip.vision:SiglipVision"

    def __init__(self, path: Path, options: Options) -> None:
        config = Section.read(path / CONFIG_FILE)
        text, processor = read_text(config), read_processor(path)
        section = tower_section(config, "vision_config")
        size, patch = read_sizes(section, image_size=224, patch_size=16)
        vision = read_vision(section, patch=patch, grid=size // patch)
        processing = read_processing(processor, resample=3, mean=HALF, std=HALF)
        tokenizer = self.read_tokenizer(path, text, options.texts)
        super().__init__(path, text, vision, processing, options, tokenizer=tokenizer)
        self.tiling = read_tiling(processor, size=size, patch=patch, crops=False)


def read_text(config: Section) -> EncoderSpec:
    """Read the text tower; raises ``CheckpointError``."""
    section = tower_section(config, "text_config")
    layer, layers = read_layer(section, _DEFAULTS)
    width = section.integer("projection_size", layer.hidden)
    return EncoderSpec(
        vocab_size=section.integer("vocab_size", 32_000),
        layers=layers,
        layer=layer,
        pooling="last",
        head=HeadSpec(width=width, bias=True),
        positions=section.integer("max_position_embeddings", 64),
    )


def read_vision(section: Section, *, patch: int, grid: int) -> VisionConfig:
    """Read the vision tower; raises ``CheckpointError``. Its vectors are as wide as its rows."""
    check_channels(section)
    if not section.flag("vision_use_head", True):
        raise section.error("vision_use_head", "is false; without its head the tower makes no vector")
    layer, layers = read_layer(section, _DEFAULTS)
    return VisionConfig(layer=layer, layers=layers, patch_size=patch, grid=grid, width=layer.hidden)


FAMILY: Family = OptionsFamily(
    model_types=("siglip",),
    hub_models=(
        "google/siglip-base-patch16-224",
        "google/siglip-large-patch16-384",
        "google/siglip-so400m-patch14-384",
        "google/siglip2-base-patch16-224",
        "google/siglip2-large-patch16-384",
        "google/siglip2-so400m-patch14-384",
        "google/siglip2-so400m-patch16-512",
    ),
    options=Options,
    opened=Siglip,
    architectures=("SiglipModel",),
)
