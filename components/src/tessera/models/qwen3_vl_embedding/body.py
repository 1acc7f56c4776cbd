"""What models with Qwen3-VL's towers have in common: images, positions, tensors; opening needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from tessera.checkpoint.safetensors import StoredTensor
from tessera.checkpoint.weights import Shapes
from tessera.errors import CheckpointError, ConfigError
from tessera.image_plan import ImagePlan
from tessera.imaging import Picture
from tessera.models.base import Content, Empty, Int32Array, Pixels, VisionSpec
from tessera.models.prompts import Fixed, Run, Segment
from tessera.models.qwen3.tokenizer import END_OF_TEXT, IMAGE, TURN_END, TURN_START, VISION_END, VISION_START
from tessera.models.qwen3_vl_embedding.config import PROCESSOR_FILE, ModelConfig
from tessera.models.qwen3_vl_embedding.patches import check_grid, cut, places, positions
from tessera.models.qwen3_vl_embedding.resize import Limits
from tessera.models.qwen3_vl_embedding.tensors import stored_tensors, vision_shapes
from tessera.models.tower import TowerModel

if TYPE_CHECKING:
    from tessera.nn.vision import VisionTower


class ImageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Areas in pixels bound what an image is resized to; ``max_tokens`` bounds one input."""

    min_pixels: Annotated[int, msgspec.Meta(ge=1)] = 4_096
    max_pixels: Annotated[int, msgspec.Meta(ge=1, le=1 << 27)] = 1_843_200
    max_tokens: Annotated[int, msgspec.Meta(ge=64)] = 8_192


class Qwen3VLBody(TowerModel):
    """Base of families whose towers are Qwen3-VL's."""

    files = (*TowerModel.files, PROCESSOR_FILE)

    def __init__(
        self, path: Path, config: ModelConfig, options: ImageOptions, *, dimensions: Collection[int] = ()
    ) -> None:
        """Read the tokenizer; the weights are not looked at.

        Raises ``CheckpointError``, and ``ConfigError`` for options that leave no image a size.
        """
        smallest = (config.vision.patch_size * config.vision.merge) ** 2
        if options.max_pixels < max(options.min_pixels, smallest):
            raise ConfigError(
                f"model option max_pixels {options.max_pixels} is below min_pixels {options.min_pixels},"
                f" or below the {smallest} of the smallest image"
            )
        max_tokens = min(options.max_tokens, config.max_positions)
        super().__init__(path, config.text, options, max_tokens=max_tokens, dimensions=dimensions)
        tokenizer = self._tokenizer
        for name, token in (
            (IMAGE, config.image_token),
            (VISION_START, config.vision_start),
            (VISION_END, config.vision_end),
        ):
            if tokenizer.id_of(name) != token:
                raise CheckpointError(
                    f"{tokenizer.path}: {name} has id {tokenizer.id_of(name)}, but config.json says {token}"
                )
        self.config = config
        self.placeholder = config.image_token
        self.normalisation = config.mean, config.std
        self.limits = Limits(
            edge=config.vision.patch_size * config.vision.merge,
            min_pixels=options.min_pixels,
            max_pixels=options.max_pixels,
        )
        self.turn_start, self.turn_end, self.end = map(tokenizer.id_of, (TURN_START, TURN_END, END_OF_TEXT))

    @cached_property
    def vision(self) -> VisionSpec:
        vision = self.config.vision
        rows = self.limits.most_rows
        side = next(side for side in range(isqrt(rows), 0, -1) if rows % side == 0)
        return VisionSpec(
            row_width=vision.row_width,
            unit_shape=(vision.channels, vision.patch_size, vision.patch_size),
            largest=self._plan(side * self.limits.edge, rows // side * self.limits.edge),
        )

    def plan(self, width: int, height: int, *, param: str) -> ImagePlan:
        return self._plan(*self.limits.resized(width, height, param=param))

    def _plan(self, width: int, height: int) -> ImagePlan:
        patch, merge = self.config.vision.patch_size, self.config.vision.merge
        high, wide = height // patch, width // patch
        return ImagePlan(units=high * wide, rows=high * wide // merge**2, grid=(1, high, wide))

    def user(self, content: Content, *, param: str) -> list[Segment]:
        """What stands between the marks of a user's turn: the parts in order.

        Neighbouring texts become one; nothing stands between parts.
        """
        user: list[Segment] = []
        before = "user\n"
        for are_images, parts in groupby(content.parts, lambda part: isinstance(part, ImagePlan)):
            if not are_images:
                user.append(Run(before, "".join(map(str, parts))))
                before = ""
                continue
            if before:
                user.append(Fixed(before))
                before = ""
            user += self.marked([image for image in parts if isinstance(image, ImagePlan)], param)
        return user

    def marked(self, images: Sequence[ImagePlan], param: str) -> list[Segment]:
        """Images between the marks of one; raises ``InvalidInput`` naming ``param`` for a wrong grid."""
        segments: list[Segment] = []
        for image in images:
            check_grid(image, merge=self.config.vision.merge, param=param)
            segments += (self.config.vision_start, image, self.config.vision_end)
        return segments

    def positions(self, tokens: Int32Array, images: Sequence[ImagePlan]) -> Int32Array:
        merge = self.config.vision.merge
        return positions(self.vision_index(tokens), images, len(tokens), merge=merge)

    def unit_positions(self, image: ImagePlan) -> Int32Array:
        """int32 ``[4, units]``: row, column, and the image's height and width, in patches."""
        return places(image, merge=self.config.vision.merge)

    def preprocess(self, picture: Picture, empty: Empty = np.empty) -> Pixels:
        vision = self.config.vision
        size = self.limits.resized(*picture.size, param=picture.param)
        patches = cut(picture, size, patch=vision.patch_size, merge=vision.merge, empty=empty)
        return Pixels(values=patches, plan=self._plan(*size))

    def vision_tower(self) -> VisionTower:
        from tessera.models.qwen3_vl_embedding.vision import Qwen3VLVision

        return Qwen3VLVision(self.config.vision)

    def tensors(self) -> Mapping[str, StoredTensor]:
        return stored_tensors(self.path, self.config)

    def vision_shapes(self) -> Shapes:
        return vision_shapes(self.config.vision)

    def vision_activations(self, units: int) -> int:
        vision = self.config.vision
        hidden = vision.layer.hidden
        # The pixels as bytes, in float32 before and after normalising, whatever the module's type.
        pixels = 2 * hidden + 3 * vision.channels * vision.patch_size**2
        # Merged patches before, between and behind a merger's two layers, beside the rows.
        merger = 5 * hidden
        rows = 2 * vision.row_width // vision.merge**2
        return units * (max(vision.layer.activations(), pixels, merger) + rows)
