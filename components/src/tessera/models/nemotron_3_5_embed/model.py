"""A checkpoint of Nemotron-3.5-Embed as the rest of Tessera sees it; importing and opening need no torch.

A prompt is a user's turn of the checkpoint's own chat template, behind the role's prompt as a system message.
In it a placeholder of the template stands for an image: its vision rows, with a mark behind each row of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tessera.checkpoint.declared import read_declared
from tessera.checkpoint.weights import Shapes
from tessera.image_plan import ImagePlan
from tessera.models.base import (
    Content,
    Family,
    Int32Array,
    Prompt,
    Role,
    Truncate,
    VisionSpec,
)
from tessera.models.chat import CHAT_FILES, Chat
from tessera.models.declared import role_prompts
from tessera.models.nemotron_3_5_embed.config import ARCHITECTURES, SETTINGS_FILE, read_config
from tessera.models.nemotron_3_5_embed.images import laid_out
from tessera.models.options import MaxTokens, OptionsFamily
from tessera.models.patches import PatchedImages
from tessera.models.prompts import Segment
from tessera.models.two_towers.images import PROCESSOR_FILE


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts that are not empty win over declared ones; ``pooling`` is for a checkpoint that declares none.

    A ``longest_edge`` of 0 is that of the checkpoint's processor. ``max_tokens`` bounds one input.
    """

    query_prompt: str = ""
    document_prompt: str = ""
    pooling: Literal["declared", "avg", "last", "cls"] = "declared"
    longest_edge: Annotated[int, msgspec.Meta(ge=0, le=4_096)] = 0
    max_tokens: MaxTokens = 32_768


class Nemotron35Embed(PatchedImages):
    """Implements ``tessera.models.base.Model``."""

    family = "nemotron_3_5_embed"
    vision_class = "tessera.models.nemotron_3_5_embed.vision:PixtralVision"
    files = (*PatchedImages.files, PROCESSOR_FILE, SETTINGS_FILE, *CHAT_FILES)
    prefixes = (
        ("vision_tower.", "vision."),
        ("multi_modal_projector.", "vision.projector."),
        ("language_model.model.", "text."),
        ("language_model.", "text."),
    )

    def __init__(self, path: Path, options: Options) -> None:
        """Read configuration, tokenizer and chat template; the weights are not looked at.

        Raises ``CheckpointError``.
        """
        declared = read_declared(path)
        config = read_config(path, declared, pooling=options.pooling, longest_edge=options.longest_edge)
        super().__init__(
            path,
            config.text,
            options,
            max_tokens=min(options.max_tokens, config.max_positions),
            dimensions=range(1, config.text.layer.hidden),
            declared=declared,
        )
        self.config, self.patched = config, config.vision
        self.vision_config = config.vision
        self.resample = config.processing.resample
        image, row_end, image_end = map(self._tokenizer.id_of, config.marks)
        self._tokenizer.require(config.marks[0], config.image_token, "config.json says")
        self.placeholder = image
        self.normalisation = config.processing.mean, config.processing.std
        self._image_marks = image, row_end, image_end
        self._chat = Chat(path, self._tokenizer, placeholder=image, generation=False)
        self.prompts = role_prompts(
            self.declared,
            {Role.NONE: "", Role.QUERY: "query:", Role.PASSAGE: "passage:"},
            query=options.query_prompt,
            document=options.document_prompt,
        )

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """The turn of the images and the texts, which are joined as they are in place of the first."""
        parts: list[str | ImagePlan] = []
        text = content.text
        for part in content.parts:
            if isinstance(part, ImagePlan):
                parts.append(part)
            elif text:
                parts.append(text)
                text = ""
        prompt = content.prompt_of(self.prompts)
        return self._chat.segments(prompt, parts, lambda image: self._image(image, param), param=param)

    def written_texts(self, content: Content, *, param: str) -> Sequence[str]:
        prompt = content.prompt_of(self.prompts)
        return [self._chat.written(prompt, text, param=param) for text in content.texts]

    def _image(self, image: ImagePlan, param: str) -> Sequence[Segment]:
        self.patched.check(image, param)
        rows, columns = self.patched.sides(image)
        # Marks among its rows count as rows.
        return (replace(image, rows=rows * (columns + 1)),)

    def prompt(self, content: Content, *, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        """Marks stand among an image's placeholders; they count as tokens of the prompt, not of the image."""
        made = super().prompt(content, max_tokens=max_tokens, truncate=truncate, param=param)
        if not content.images or content.token_ids is not None:
            return made
        tokens = laid_out(made.tokens, map(self.patched.sides, content.images), self._image_marks)
        rows = sum(image.rows for image in content.images)
        return replace(made, tokens=tokens, image_tokens=rows)

    @cached_property
    def vision(self) -> VisionSpec:
        side = self.config.limits.most_sides * self.patched.edge
        return self.patched.spec(self.config.vision.width, side, side)

    def resized(self, width: int, height: int, param: str) -> tuple[int, int]:
        return self.config.limits.resized(width, height)

    def unit_positions(self, image: ImagePlan) -> Int32Array:
        """int32 ``[2, units]``: row and column in patches."""
        return self.patched.places(image)[:2]

    def vision_shapes(self) -> Shapes:
        return self.config.vision.shapes()

    def vision_activations(self, units: int) -> int:
        vision = self.config.vision
        hidden = vision.layer.hidden
        # Rows behind and before each of the projector's products, beside those of the layers.
        projector = 3 * hidden + (hidden + 3 * vision.width) // vision.merge**2
        return units * max(vision.layer.activations(), vision.pixel_elements, projector)


FAMILY: Family = OptionsFamily(
    model_types=("mistral3",),
    hub_models=(
        "nvidia/Nemotron-3.5-Embed-1B-BF16",
        "nvidia/Nemotron-3.5-Embed-8B-BF16",
        "nvidia/Nemotron-3.5-Embed-1B-NVFP4",
    ),
    options=Options,
    opened=Nemotron35Embed,
    architectures=ARCHITECTURES,
)
