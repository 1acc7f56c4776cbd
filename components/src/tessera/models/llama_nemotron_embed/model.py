"""A checkpoint of Llama Nemotron Embed as the rest of Tessera sees it; opening needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from tessera.checkpoint.section import Section
from tessera.checkpoint.tokenizer import PlainTokenizer
from tessera.models.base import Content
from tessera.models.llama.config import POOLINGS, max_positions, read_backbone, read_dimensions
from tessera.models.llama.prompt import bos_of, read_prefixes
from tessera.models.prompts import Segment, text_segments
from tessera.models.text_only import TextOnly
from tessera.models.tower import CONFIG_FILE, TowerModel
from tessera.nn.spec import TextSpec

FAMILY_NAME: Final = "llama_nemotron_embed"

# What the published models were trained to be cut to, where the configuration lists nothing else.
_TRAINED: Final = (384, 512, 768, 1024, 2048)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``pooling`` is that of a ``config.json`` that names none; ``max_tokens`` bounds one input."""

    pooling: Literal["avg", "last", "cls"] = "avg"
    max_tokens: Annotated[int, msgspec.Meta(ge=16)] = 8_192


class LlamaNemotronEmbed(TextOnly, TowerModel):
    """Implements ``tessera.models.base.Model``."""

    family = FAMILY_NAME
    revision = "llama_nemotron_embed 1"

    def __init__(self, path: Path, options: Options) -> None:
        """Read configuration and tokenizer; the weights are not looked at. Raises ``CheckpointError``."""
        config = Section.read(path / CONFIG_FILE)
        text = read_config(config, options)
        tokenizer = PlainTokenizer.read(path, vocab_size=text.vocab_size)
        super().__init__(
            path,
            text,
            tokenizer,
            options,
            max_tokens=min(options.max_tokens, max_positions(config)),
            dimensions=read_dimensions(config, text.layer.hidden, default=_TRAINED),
        )
        self._prefixes = read_prefixes(config)
        self._bos = bos_of(tokenizer)

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """BOS, the role's prefix and the texts, joined as they are."""
        if content.images:
            self._refuse(param)
        return text_segments(self._bos, self._prefixes[content.role], content)


def read_config(config: Section, options: Options) -> TextSpec:
    """The backbone that ``config.json`` describes; raises ``CheckpointError``."""
    pooling = config.string("pooling", options.pooling, among=tuple(POOLINGS))
    return read_backbone(config, pooling=POOLINGS[pooling])
