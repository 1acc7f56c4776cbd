"""A checkpoint of two towers as the rest of Tessera sees it; importing and opening need no torch.

An input is one text, or one image and nothing else. What the vision tower makes of an image is its vector.
The placeholder in its prompt is no token of the vocabulary, and no text engine sees it.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from tessera.checkpoint.section import CONFIG_FILE
from tessera.checkpoint.tokenizer import PlainTokenizer
from tessera.errors import CheckpointError, InvalidInput
from tessera.imaging import Picture
from tessera.models.base import (
    Content,
    Empty,
    ImagePlan,
    Pixels,
    Prompt,
    Truncate,
    VisionSpec,
)
from tessera.models.declared import role_prompts
from tessera.models.tower import NO_PROMPTS, TowerModel
from tessera.models.two_towers.config import VisionConfig
from tessera.models.two_towers.images import PROCESSOR_FILE, Processing, Tiling
from tessera.models.two_towers.tensors import canonical
from tessera.nn.spec import CHANNELS, EncoderSpec

_ONE: Final = ImagePlan(units=1, rows=1)


class TwoTowers(TowerModel):
    """Base of families of two towers; thread-safe once opened. An image is one unit and one row."""

    declares_causal = False
    files = (*TowerModel.files, PROCESSOR_FILE, "processor_config.json")

    def __init__(
        self,
        path: Path,
        text: EncoderSpec,
        vision: VisionConfig,
        processing: Processing,
        options: msgspec.Struct | None = None,
        *,
        tokenizer: PlainTokenizer | None = None,
    ) -> None:
        """Raises ``CheckpointError`` for towers whose vectors differ in width."""
        super().__init__(path, text, options, max_tokens=text.positions, tokenizer=tokenizer)
        if self.text.width != vision.width:
            raise CheckpointError(
                f"{path / CONFIG_FILE}: the text tower's vectors are {self.text.width} wide,"
                f" those of the vision tower {vision.width}"
            )
        self.config = self.vision_config = vision
        self.processing = processing
        self.normalisation = processing.mean, processing.std
        self.placeholder = text.vocab_size
        self.prompts = role_prompts(self.declared, NO_PROMPTS)

    @property
    @abstractmethod
    def unit_shape(self) -> tuple[int, ...]:
        """The shape of an image's pixels."""

    @property
    def patches(self) -> int:
        """Rows that the vision tower's layers have for one image."""
        return self.config.grid**2

    @cached_property
    def vision(self) -> VisionSpec:
        return VisionSpec(
            row_width=self.config.width,
            unit_shape=self.unit_shape,
            largest=_ONE,
            independent_units=True,
            gives_output=True,
        )

    def plan(self, width: int, height: int, *, param: str) -> ImagePlan:
        return _ONE

    def prompt(self, content: Content, *, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        if not content.images:
            return super().prompt(content, max_tokens=max_tokens, truncate=truncate, param=param)
        # Ids that are the image's placeholder say nothing beside it.
        said = [part for part in content.parts if not isinstance(part, ImagePlan) and len(part)]
        repeats = len(said) == 1 and said[0] is content.token_ids and said[0].tolist() == [self.placeholder]
        if content.instruction is not None or (said and not repeats):
            raise InvalidInput(
                f"{param} has an image and more; {self.family} embeds a text or an image, each on its own",
                param=param,
            )
        if len(content.images) > 1:
            raise InvalidInput(
                f"{param} has {len(content.images)} images; {self.family} embeds each on its own", param=param
            )
        return Prompt(tokens=np.array([self.placeholder], np.int32), image_tokens=1)

    def stored_name(self, name: str) -> str | None:
        return canonical(name)

    def vision_activations(self, units: int) -> int:
        return self.config.activations(units * self.patches)


class TiledTowers(TwoTowers):
    """Base of families whose images become one tile of fixed size."""

    tiling: Tiling

    @property
    def unit_shape(self) -> tuple[int, ...]:
        return CHANNELS, self.tiling.kept, self.tiling.kept

    def preprocess(self, picture: Picture, empty: Empty = np.empty) -> Pixels:
        return Pixels(values=self.tiling.cut(picture, self.processing, empty), plan=_ONE)
