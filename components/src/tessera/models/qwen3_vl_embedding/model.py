"""A checkpoint of Qwen3-VL-Embedding as the rest of Tessera sees it; importing and opening need no torch."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from tessera.models.base import Content, Family
from tessera.models.declared import check_embeds, role_prompts
from tessera.models.options import OptionsFamily
from tessera.models.prompts import Fixed, Segment
from tessera.models.qwen3_vl_embedding.body import ImageOptions, Qwen3VLBody
from tessera.models.qwen3_vl_embedding.config import read_config
from tessera.models.tower import NO_PROMPTS

_SMALLEST: Final = 64  # the narrowest vector that it was trained to be cut to


class Options(ImageOptions, frozen=True, forbid_unknown_fields=True):
    """``instruction`` is that of inputs without one.

    ``task`` takes a checkpoint for an embedder that does not declare how it makes a vector.
    """

    instruction: Annotated[str, msgspec.Meta(min_length=1)] = "Represent the user's input."
    task: Literal["auto", "embed"] = "auto"


class Qwen3VLEmbedding(Qwen3VLBody):
    """Implements ``tessera.models.base.Model``."""

    family = "qwen3_vl_embedding"
    takes_instructions = True

    def __init__(self, path: Path, options: Options) -> None:
        config = read_config(path)
        super().__init__(path, config, options, dimensions=range(_SMALLEST, config.text.layer.hidden))
        check_embeds(self.declared, options.task)
        self._instruction = options.instruction
        # A prompt of this family is a system turn.
        self.prompts = role_prompts(self.declared, NO_PROMPTS)

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """A system turn with the instruction, a user turn with the parts in order, and an empty answer."""
        prompt = content.prompt_of(self.prompts)
        if content.instruction is not None:
            prompt = content.instruction
        instruction = punctuated(prompt) or self._instruction
        return [
            *(self.turn_start, Fixed(f"system\n{instruction}"), self.turn_end, Fixed("\n")),
            *(self.turn_start, *self.user(content), self.turn_end, Fixed("\n")),
            *(self.turn_start, Fixed("assistant\n"), self.end),
        ]


def punctuated(instruction: str) -> str:
    """An instruction without space around it, and with a full stop unless it ends in punctuation."""
    stripped = instruction.strip()
    if stripped and not unicodedata.category(stripped[-1]).startswith("P"):
        return f"{stripped}."
    return stripped


FAMILY: Family = OptionsFamily(
    model_types=("qwen3_vl",),
    hub_models=("Qwen/Qwen3-VL-Embedding-2B", "Qwen/Qwen3-VL-Embedding-8B"),
    options=Options,
    opened=Qwen3VLEmbedding,
)
