"""Checkpoints of Llama Nemotron Embed and Rerank as the rest of Tessera sees them; opening needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.models.base import Content, Family, ImagePlan, OutputKind
from tessera.models.decoder import max_positions
from tessera.models.llama.config import (
    EMBEDDING,
    POOLINGS,
    SCORING,
    read_backbone,
    read_dimensions,
    read_score_head,
)
from tessera.models.llama.prompt import LlamaPairs, bos_of, read_prefixes
from tessera.models.marks import Marks
from tessera.models.options import MaxTokens, OptionsFamily
from tessera.models.prompts import Run, Segment
from tessera.models.tower import TowerModel
from tessera.nn.spec import TextSpec

# What the published models were trained to be cut to, where the configuration lists nothing else.
_TRAINED: Final = (384, 512, 768, 1024, 2048)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``pooling`` is that of a ``config.json`` that names none; ``max_tokens`` bounds one input, or pair."""

    pooling: Literal["avg", "last", "cls"] = "avg"
    max_tokens: MaxTokens = 8_192


class LlamaNemotronEmbed(TowerModel):
    """Implements ``tessera.models.base.Model``; a prompt is BOS, the role's prefix and the texts."""

    family = "llama_nemotron_embed"

    def __init__(self, path: Path, options: Options) -> None:
        config = Section.read(path / CONFIG_FILE)
        text = read_config(config, options, self.kind)
        super().__init__(
            path,
            text,
            options,
            max_tokens=min(options.max_tokens, max_positions(config)),
            dimensions=_dimensions(config, text, self.kind),
        )
        if not config.has("pooling") and self.declared.pooling is None and options.pooling == "avg":
            self.lacking_keys = ("pooling",)
        self.prompts = read_prefixes(config, declared=self.declared)
        self.marks = Marks((bos_of(self._tokenizer),))


def read_config(config: Section, options: Options, kind: OutputKind = OutputKind.VECTOR) -> TextSpec:
    """The backbone that ``config.json`` describes, with the head of scores; raises ``CheckpointError``."""
    pooling = POOLINGS[config.string("pooling", options.pooling, among=tuple(POOLINGS))]
    if kind is OutputKind.SCORE:
        head = read_score_head(config)
        return read_backbone(config, pooling=pooling, architectures=(SCORING,), head=head)
    return read_backbone(config, pooling=pooling)


def _dimensions(config: Section, text: TextSpec, kind: OutputKind) -> frozenset[int]:
    if kind is OutputKind.SCORE:
        return frozenset()
    return read_dimensions(config, text.layer.hidden, default=_TRAINED)


class LlamaNemotronRerank(LlamaPairs, LlamaNemotronEmbed):
    """Implements ``tessera.models.base.PairModel``; its output is the raw logit of a pair."""

    family = "llama_nemotron_rerank"

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """BOS and the texts as they are: a prompt that the client made."""
        return [*self.marks.before, Run("", content.text), *self.marks.behind]

    def before_pair(self, images: Sequence[ImagePlan]) -> tuple[list[Segment], str]:
        return [*self.marks.before], ""


FAMILY: Family = OptionsFamily(
    model_types=("llama_bidirec",),
    hub_models=("nvidia/llama-nemotron-embed-1b-v2",),
    options=Options,
    opened=LlamaNemotronEmbed,
    architectures=(EMBEDDING,),
)

RERANK: Family = OptionsFamily(
    model_types=("llama_bidirec",),
    hub_models=("nvidia/llama-nemotron-rerank-1b-v2",),
    options=Options,
    opened=LlamaNemotronRerank,
    architectures=(SCORING,),
)
