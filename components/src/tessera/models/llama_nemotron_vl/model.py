"""Checkpoints of Llama Nemotron Embed, ColEmbed and Rerank VL; importing and opening need no torch.

The layout of a prompt, with ``p`` the role's prefix (``"query: "``, ``"passage: "`` or nothing)::

    text            BOS  p + text
    images          BOS  p  (<img> placeholders </img>, " " between two of them)  " " + text

The space after the last image stays even without text. There is no end token. ColEmbed has the prefix before
the images and again behind them::

    images          BOS  p  (<img> placeholders </img>, " " between two of them)  " " + p + text

A pair of Rerank, where either side may have images, has those of the query first::

    texts           BOS  question:{query}\\n\\npassage:{document}
    images          BOS  (<img> placeholders </img>, " " between two of them)  " " + the same

with a space on either side of each line break.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from tessera.checkpoint.weights import Shapes
from tessera.imaging import Picture
from tessera.models.base import (
    Content,
    Empty,
    Family,
    ImagePlan,
    OutputKind,
    Pixels,
    VisionSpec,
)
from tessera.models.llama.prompt import LlamaPairs, bos_of
from tessera.models.llama_nemotron_vl.config import PROCESSOR_FILE, read_config
from tessera.models.llama_nemotron_vl.images import count_tiles, cut
from tessera.models.llama_nemotron_vl.tensors import expected, used_for_vision
from tessera.models.marks import Marks
from tessera.models.options import NoOptions, OptionsFamily
from tessera.models.prompts import Fixed, Run, Segment
from tessera.models.stages import StageModule, check_stage
from tessera.models.tower import TowerModel
from tessera.nn.spec import CHANNELS

_MARKS = ("<img>", "</img>", "<IMG_CONTEXT>")
"""What stands before an image, behind it, and for each of its rows: ids that text can never produce."""


class LlamaNemotronVL(TowerModel):
    """Implements ``tessera.models.base.Model``; thread-safe once opened."""

    family = "llama_nemotron_vl"
    files = (CONFIG_FILE, PROCESSOR_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)
    # The longest first, because the shorter ones are beginnings or endings of the longer.
    prefixes = (
        ("vision_model.vision_model.", "vision."),
        ("vision_model.", "vision."),
        ("mlp1.", "projector."),
        ("language_model.model.", "text."),
        ("language_model.", "text."),
        ("score.", "text.head."),
    )
    vision_part = ""
    vision_class = "tessera.models.llama_nemotron_vl.vision:LlamaNemotronVision"

    def __new__(cls, path: Path, options: NoOptions | None = None) -> LlamaNemotronVL:
        # Late interaction has the same architecture, and may have no other mark than this one.
        if cls is LlamaNemotronVL and Section.read(path / CONFIG_FILE).values.get("pooling") == "colbert":
            cls = LlamaNemotronColEmbedVL
        return super().__new__(cls)

    def __init__(self, path: Path, options: NoOptions | None = None) -> None:
        """Read configuration and tokenizer; the weights are not looked at.

        Raises ``CheckpointError``, also for a control token that the tokenizer lacks, and for ids that
        disagree with the configuration.
        """
        self.config = self.vision_config = config = read_config(path, self.kind)
        super().__init__(
            path,
            config.text,
            max_tokens=config.max_tokens,
            dimensions=config.dimensions,
            declared=config.declared,
        )
        tokenizer = self._tokenizer
        self._image_start, self._image_end, self.placeholder = map(tokenizer.id_of, _MARKS)
        tokenizer.require(_MARKS[2], config.image_token_id, "img_context_token_id is")
        self.normalisation = config.image.mean, config.image.std
        self.prompts, self.lacking_keys = config.prefixes, config.lacking_keys
        self.marks = Marks((bos_of(tokenizer),))
        self._strips_before_image = bool(tokenizer.added[_MARKS[0]].get("lstrip"))
        self.strips_after_image = bool(tokenizer.added[_MARKS[1]].get("rstrip"))
        self._rows_per_tile = config.tokens_per_tile
        self.image_axes = "units", config.tokens_per_tile

    @cached_property
    def vision(self) -> VisionSpec:
        size = self.config.image.tile_size
        return VisionSpec(
            row_width=self.config.text.row_width,
            unit_shape=(CHANNELS, size, size),
            largest=self._tiled(self.config.max_tiles),
            independent_units=True,
        )

    def plan(self, width: int, height: int, *, param: str) -> ImagePlan:
        return self._tiled(count_tiles(width, height, self.config.image))

    def _tiled(self, tiles: int) -> ImagePlan:
        return ImagePlan(units=tiles, rows=tiles * self._rows_per_tile)

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """Texts are joined as they are; images stand before them.

        A marker that strips takes the space beside it.
        """
        if not content.images:
            return super().segments(content, param=param)
        spaced = " " + content.text
        run = Run("", spaced.lstrip() if self.strips_after_image else spaced)
        return [*self.before_text(content.prompt_of(self.prompts), content.images), run]

    def before_text(self, prefix: str, images: Sequence[ImagePlan]) -> list[Segment]:
        """What stands before the text of a prompt with images: BOS, the prefix, and the images."""
        before, after = self._strips_before_image, self.strips_after_image
        made: list[Segment] = [*self.marks.before, Fixed(prefix.rstrip() if before else prefix)]
        for position, image in enumerate(images):
            if position and not before and not after:
                made.append(Fixed(" "))
            made += (self._image_start, image, self._image_end)
        return made

    def preprocess(self, picture: Picture, empty: Empty = np.empty) -> Pixels:
        tiles = cut(picture, self.config.image, empty)
        return Pixels(values=tiles, plan=self._tiled(len(tiles)))

    def vision_shapes(self) -> Shapes:
        return used_for_vision(self.config)

    def stored_shapes(self) -> Shapes:
        return expected(self.config)

    def load_stage(
        self, stage: str, *, layout: str, dtype: str, device: str, max_sequences: int = 1024
    ) -> StageModule:
        """A part of the model for compilers; raises ``CheckpointError`` or ``ConfigError``."""
        if stage != "vision":
            return super().load_stage(
                stage, layout=layout, dtype=dtype, device=device, max_sequences=max_sequences
            )
        from tessera.models.llama_nemotron_vl.vision import vision_stage
        from tessera.nn.forms.choice import exported

        check_stage(stage, layout, (stage,))
        form = exported(device, dtype, max_sequences=max_sequences)
        return vision_stage(self.load_vision(dtype=dtype, device=device, form=form), self.config, dtype=dtype)

    def vision_activations(self, units: int) -> int:
        return self.config.vision_activations(units)


class LlamaNemotronColEmbedVL(LlamaNemotronVL):
    """Implements ``tessera.models.base.Model``; its output is a vector of each token, prefixes included."""

    family = "llama_nemotron_colembed_vl"
    kind = OutputKind.TOKENS

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        if not content.images:
            return super().segments(content, param=param)
        prefix = content.prompt_of(self.prompts)
        again = prefix if self.strips_after_image else f" {prefix}"
        run = Run(again, content.text)
        return [*self.before_text(prefix, content.images), run]


class LlamaNemotronRerankVL(LlamaPairs, LlamaNemotronVL):
    """Implements ``tessera.models.base.PairModel``; its output is the raw logit of a pair."""

    family = "llama_nemotron_rerank_vl"

    def before_pair(self, images: Sequence[ImagePlan]) -> tuple[list[Segment], str]:
        if not images:
            return [*self.marks.before], ""
        return self.before_text("", images), "" if self.strips_after_image else " "


FAMILY: Family = OptionsFamily(
    model_types=("llama_nemotron_vl",),
    hub_models=("nvidia/llama-nemotron-embed-vl-1b-v2",),
    options=NoOptions,
    opened=LlamaNemotronVL,
    architectures=("LlamaNemotronVLModel",),
)

COLEMBED: Family = OptionsFamily(
    model_types=("llama_nemotron_vl",),
    hub_models=("nvidia/llama-nemotron-colembed-vl-3b-v2",),
    options=NoOptions,
    opened=LlamaNemotronColEmbedVL,
    architectures=("LlamaNemotronColEmbedVLModel",),
)

RERANK: Family = OptionsFamily(
    model_types=("llama_nemotron_vl_rerank",),
    hub_models=("nvidia/llama-nemotron-rerank-vl-1b-v2",),
    options=NoOptions,
    opened=LlamaNemotronRerankVL,
)
