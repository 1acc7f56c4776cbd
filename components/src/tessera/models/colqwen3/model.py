"""A checkpoint of ColQwen3 as the rest of Tessera sees it; importing and opening need no torch.

The layout of a prompt::

    query           Query: {text}                and end tokens, of which each becomes a vector as well
    text            {text}
    images          a user's turn of the images and the text, or "Describe the image."; an end token

Ops-Colqwen3 has an empty turn of the assistant before that last token.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final

import msgspec

from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.models.base import Content, Family, OutputKind, Role
from tessera.models.declared import role_prompts
from tessera.models.options import OptionsFamily
from tessera.models.prompts import Fixed, Run, Segment
from tessera.models.qwen3_vl_embedding.body import ImageOptions, Qwen3VLBody
from tessera.models.qwen3_vl_embedding.config import ModelConfig
from tessera.models.qwen3_vl_embedding.config import read_config as read_body
from tessera.models.tower import NO_PROMPTS
from tessera.nn.spec import HeadSpec, TextSpec

TOMORO: Final = "colqwen3"
OPS: Final = "ops_colqwen3"

_ARCHITECTURES: Final = ("ColQwen3", "OpsColQwen3Model")
_WIDTHS: Final = ("embed_dim", "dims", "dim", "projection_dim", "colbert_dim")
_DEFAULT_WIDTH: Final = 320
_HEAD: Final = "text.head."
_SMALLEST: Final = 32
_QUERY_PREFIX: Final = "Query: "
_ALONE: Final = "Describe the image."


class Options(ImageOptions, frozen=True, forbid_unknown_fields=True):
    """``query_prefix`` stands before a query, ``query_end_tokens`` end tokens behind it.

    Releases of the tools that these models are trained with differ in both.
    """

    min_pixels: Annotated[int, msgspec.Meta(ge=1)] = 65_536
    max_pixels: Annotated[int, msgspec.Meta(ge=1, le=1 << 27)] = 1_310_720
    query_prefix: str = _QUERY_PREFIX
    query_end_tokens: Annotated[int, msgspec.Meta(ge=0, le=64)] = 10


class ColQwen3(Qwen3VLBody):
    """Implements ``tessera.models.base.Model``; its output is a vector of each token, template included."""

    family = "colqwen3"
    version = 3
    by_processor = True
    prefixes = (("embedding_proj_layer.", _HEAD), ("custom_text_proj.", _HEAD), *Qwen3VLBody.prefixes)
    kind = OutputKind.TOKENS

    def __init__(self, path: Path, options: Options) -> None:
        config = read_config(path)
        self._answers = Section.read(path / CONFIG_FILE).string("model_type", among=(TOMORO, OPS)) == OPS
        # That of Ops is trained to be cut.
        widths = range(_SMALLEST, config.text.width) if self._answers else ()
        super().__init__(path, config, options, dimensions=widths)
        own = {Role.QUERY: options.query_prefix}
        # An option that was chosen wins over what is declared.
        chosen = own if options.query_prefix != _QUERY_PREFIX else {}
        self.prompts = role_prompts(self.declared, {**NO_PROMPTS, **own}, found=chosen)
        self._end_tokens = options.query_end_tokens

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        if content.images:
            user = self.user(content)
            if not content.text:
                user.append(Fixed(_ALONE))
            answer = (self.turn_start, Fixed("assistant\n")) if self._answers else ()
            return [self.turn_start, *user, self.turn_end, *answer, self.end]
        end_tokens = self._end_tokens if content.role is Role.QUERY else 0
        return [Run(content.prompt_of(self.prompts), content.text), *[self.end] * end_tokens]

    @cached_property
    def stored_text(self) -> TextSpec:
        """The projection has a bias or none, as its files have it."""
        assert self.text.head is not None
        if f"{_HEAD}bias" in map(self.stored_name, self.stored_names):
            return self.text
        return replace(self.text, head=replace(self.text.head, bias=False))

    def stored_name(self, name: str) -> str | None:
        return super().stored_name(name.removeprefix("vlm."))


def read_config(directory: Path) -> ModelConfig:
    """Read the configuration in ``directory``: Qwen3-VL's, with the projection as the head of its tower.

    Tools call the projection's width by several names. Raises ``CheckpointError``.
    """
    config, body = Section.read(directory / CONFIG_FILE), read_body(directory, _ARCHITECTURES)
    width = next((config.integer(key) for key in _WIDTHS if config.has(key)), _DEFAULT_WIDTH)
    text = replace(body.text, pooling="none", head=HeadSpec(width=width, bias=True))
    return replace(body, text=text)


FAMILY: Family = OptionsFamily(
    model_types=(TOMORO, OPS),
    hub_models=(
        "TomoroAI/tomoro-colqwen3-embed-4b",
        "TomoroAI/tomoro-colqwen3-embed-8b",
        "OpenSearch-AI/Ops-Colqwen3-4B",
    ),
    options=Options,
    opened=ColQwen3,
)
