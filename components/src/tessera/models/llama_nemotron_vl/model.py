"""A checkpoint of this family as the rest of Tessera sees it; importing and opening need no torch.

The layout of a prompt, with ``p`` the role's prefix (``"query: "``, ``"passage: "`` or nothing)::

    text            BOS  p + text
    images          BOS  p  (<img> placeholders </img>, " " between two of them)  " " + text

The space after the last image stays even without text. There is no end token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tessera.checkpoint.safetensors import StoredTensor
from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from tessera.checkpoint.weights import Shapes
from tessera.errors import CheckpointError
from tessera.imaging import Picture
from tessera.models.base import (
    Content,
    Empty,
    Family,
    ImagePlan,
    Pixels,
    VisionSpec,
)
from tessera.models.llama.prompt import bos_of
from tessera.models.llama_nemotron_vl.config import PROCESSOR_FILE, read_config
from tessera.models.llama_nemotron_vl.images import count_tiles, cut
from tessera.models.llama_nemotron_vl.tensors import stored_tensors, used_for_vision
from tessera.models.marks import Marks
from tessera.models.options import NoOptions, OptionsFamily
from tessera.models.prompts import Fixed, Run, Segment
from tessera.models.stages import StageModule, check_stage
from tessera.models.tower import TowerModel

if TYPE_CHECKING:
    from tessera.models.llama_nemotron_vl.vision import LlamaNemotronVision

_MARKS = ("<img>", "</img>", "<IMG_CONTEXT>")
"""What stands before an image, behind it, and for each of its rows: ids that text can never produce."""


class LlamaNemotronVL(TowerModel):
    """Implements ``tessera.models.base.Model``; thread-safe once opened."""

    family = "llama_nemotron_vl"
    files = (CONFIG_FILE, PROCESSOR_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)
    vision_part = ""

    def __init__(self, path: Path, options: NoOptions | None = None) -> None:
        """Read configuration and tokenizer; the weights are not looked at.

        Raises ``CheckpointError``, also for a control token that the tokenizer lacks, and for ids that
        disagree with the configuration.
        """
        self.config = config = read_config(path, self.kind)
        super().__init__(path, config.text, max_tokens=config.max_tokens, dimensions=config.dimensions)
        tokenizer = self._tokenizer
        self._image_start, self._image_end, self.placeholder = map(tokenizer.id_of, _MARKS)
        if self.placeholder != config.image_token_id:
            raise CheckpointError(
                f"{tokenizer.path}: {_MARKS[2]} has id {self.placeholder},"
                f" but img_context_token_id is {config.image_token_id}"
            )
        self.normalisation = config.image.mean, config.image.std
        self.prompts = config.prefixes
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
            unit_shape=(self.config.vision.channels, size, size),
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

    def vision_tower(self) -> LlamaNemotronVision:
        from tessera.models.llama_nemotron_vl.vision import LlamaNemotronVision

        return LlamaNemotronVision(self.config)

    def vision_shapes(self) -> Shapes:
        return used_for_vision(self.config)

    def tensors(self) -> Mapping[str, StoredTensor]:
        return stored_tensors(self.path, self.config)

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


def _open(path: Path, _: NoOptions) -> LlamaNemotronVL:
    # Late interaction has the same class, and may have no other mark than this one.
    if Section.read(path / CONFIG_FILE).values.get("pooling") == "colbert":
        from tessera.models.llama_nemotron_colembed_vl.model import LlamaNemotronColEmbedVL

        return LlamaNemotronColEmbedVL(path)
    return LlamaNemotronVL(path)


FAMILY: Family = OptionsFamily(
    name=LlamaNemotronVL.family,
    model_types=("llama_nemotron_vl",),
    hub_models=("nvidia/llama-nemotron-embed-vl-1b-v2",),
    options=NoOptions,
    opened=_open,
    architectures=("LlamaNemotronVLModel",),
)
