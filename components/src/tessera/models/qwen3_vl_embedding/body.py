"""What models with Qwen3-VL's towers have in common: images, positions, tensors; opening needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import groupby
from math import isqrt
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec

from tessera.checkpoint.weights import Shapes
from tessera.errors import ConfigError
from tessera.image_plan import ImagePlan
from tessera.models.base import Content, Int32Array, Prompt, Truncate, VisionSpec
from tessera.models.patches import PatchedImages
from tessera.models.prompts import Fixed, Run, Segment
from tessera.models.qwen3.config import END_OF_TEXT, IMAGE, TURN_END, TURN_START, VISION_END, VISION_START
from tessera.models.qwen3_vl_embedding.config import ModelConfig
from tessera.models.qwen3_vl_embedding.resize import Limits
from tessera.models.qwen3_vl_embedding.tensors import vision_shapes
from tessera.models.two_towers.images import PROCESSOR_FILE, read_processing, read_processor


class ImageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Areas in pixels bound what an image is resized to; ``max_tokens`` bounds one input."""

    min_pixels: Annotated[int, msgspec.Meta(ge=1)] = 4_096
    max_pixels: Annotated[int, msgspec.Meta(ge=1, le=1 << 27)] = 1_843_200
    max_tokens: Annotated[int, msgspec.Meta(ge=64)] = 8_192


class Qwen3VLBody(PatchedImages):
    """Base of families whose towers are Qwen3-VL's.

    With ``by_processor`` images are resized by the processor of ``transformers``, as its file says, else by
    the code that is published with Qwen3-VL-Embedding.
    """

    declares_causal = False
    by_processor: ClassVar[bool] = False
    vision_class = "tessera.models.qwen3_vl_embedding.vision:Qwen3VLVision"
    files = (*PatchedImages.files, PROCESSOR_FILE, "processor_config.json")
    prefixes: ClassVar[Sequence[tuple[str, str]]] = (("visual.", "vision."), ("language_model.", "text."))

    def __init__(
        self, path: Path, config: ModelConfig, options: ImageOptions, *, dimensions: Collection[int] = ()
    ) -> None:
        """Read the tokenizer; the weights are not looked at.

        Raises ``CheckpointError``, and ``ConfigError`` for options that leave no image a size.
        """
        smallest = config.vision.edge**2
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
            tokenizer.require(name, token, "config.json says")
        self.config, self.patched = config, config.vision
        self.vision_config = config.vision
        self.placeholder = config.image_token
        self.normalisation = config.mean, config.std
        self.limits = Limits(
            edge=config.vision.edge,
            min_pixels=options.min_pixels,
            max_pixels=options.max_pixels,
            least_side=0 if self.by_processor else 1,
        )
        if self.by_processor:
            processor = read_processor(path)
            self.resample = read_processing(processor, resample=3, mean=config.mean, std=config.std).resample
        self.turn_start, self.turn_end, self.end = map(tokenizer.id_of, (TURN_START, TURN_END, END_OF_TEXT))

    @cached_property
    def vision(self) -> VisionSpec:
        rows, edge = self.limits.most_rows, self.limits.edge
        side = next(side for side in range(isqrt(rows), 0, -1) if rows % side == 0)
        return self.patched.spec(self.config.vision.row_width, side * edge, rows // side * edge)

    def resized(self, width: int, height: int, param: str) -> tuple[int, int]:
        return self.limits.resized(width, height, param=param)

    def prompt(self, content: Content, *, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        """As the base; raises ``InvalidInput`` for an image with a wrong grid, beside token ids as well."""
        self.check_grids(content.images, param)
        return super().prompt(content, max_tokens=max_tokens, truncate=truncate, param=param)

    def check_grids(self, images: Sequence[ImagePlan], param: str) -> None:
        """As ``PatchedVision.check``, of each image."""
        for image in images:
            self.patched.check(image, param)

    def user(self, content: Content) -> list[Segment]:
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
            user += self.marked([image for image in parts if isinstance(image, ImagePlan)])
        return user

    def marked(self, images: Sequence[ImagePlan]) -> list[Segment]:
        """Images between the marks of one."""
        start, end = self.config.vision_start, self.config.vision_end
        return [segment for image in images for segment in (start, image, end)]

    def positions(self, tokens: Int32Array, images: Sequence[ImagePlan]) -> Int32Array:
        return self.patched.positions(self.vision_index(tokens), images, len(tokens))

    def vision_shapes(self) -> Shapes:
        return vision_shapes(self.config.vision)

    def vision_activations(self, units: int) -> int:
        vision = self.config.vision
        # Merged patches before, between and behind a merger's two layers, beside the rows.
        merger = 5 * vision.layer.hidden
        rows = 2 * vision.row_width // vision.merge**2
        return units * (max(vision.layer.activations(), vision.pixel_elements, merger) + rows)
