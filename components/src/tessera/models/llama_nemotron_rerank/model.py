"""A checkpoint of Llama Nemotron Rerank as the rest of Tessera sees it; opening needs no torch."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from tessera.checkpoint.section import Section
from tessera.checkpoint.tokenizer import PlainTokenizer
from tessera.checkpoint.weights import stored_tensors
from tessera.models.base import Content, OutputKind, PairLimits, Prompt
from tessera.models.llama.config import POOLINGS, SCORING, max_positions, read_backbone, read_score_head
from tessera.models.llama.pairs import PairPrompts
from tessera.models.llama.prompt import bos_of
from tessera.models.prompts import Segment, text_segments
from tessera.models.stored_names import text_name
from tessera.models.text_only import TextOnly
from tessera.models.tower import CONFIG_FILE, TowerModel
from tessera.nn.spec import TextSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tessera.checkpoint.safetensors import StoredTensor
    from tessera.errors import InvalidInput
    from tessera.models.base import PairModel

FAMILY_NAME: Final = "llama_nemotron_rerank"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``pooling`` is that of a ``config.json`` that names none; ``max_tokens`` bounds one pair."""

    pooling: Literal["avg", "last", "cls"] = "avg"
    max_tokens: Annotated[int, msgspec.Meta(ge=16)] = 8_192


class LlamaNemotronRerank(TextOnly, TowerModel):
    """Implements ``tessera.models.base.Model``; its output is the raw logit of a pair."""

    family = FAMILY_NAME
    revision = "llama_nemotron_rerank 1"
    kind = OutputKind.SCORE

    def __init__(self, path: Path, options: Options) -> None:
        """Read configuration and tokenizer; the weights are not looked at. Raises ``CheckpointError``."""
        config = Section.read(path / CONFIG_FILE)
        text = read_config(config, options)
        tokenizer = PlainTokenizer.read(path, vocab_size=text.vocab_size)
        limit = min(options.max_tokens, max_positions(config))
        super().__init__(path, text, tokenizer, options, max_tokens=limit, dimensions=frozenset())
        self._bos = bos_of(tokenizer)

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """BOS and the texts as they are: a prompt that the client made."""
        if content.images:
            self._refuse(param)
        return text_segments(self._bos, "", content)

    @cached_property
    def _pairs(self) -> PairPrompts:
        return PairPrompts(
            tokenizer=self._tokenizer, assembler=self._assembler, first=lambda images: ([self._bos], "")
        )

    def pairs(
        self,
        query: Content,
        documents: Sequence[Content],
        *,
        limits: PairLimits,
        query_param: str,
        params: Sequence[str],
    ) -> list[Prompt | InvalidInput]:
        """A pair is of texts: token ids, images and an instruction are refused."""
        return self._pairs.prompts(query, documents, limits=limits, query_param=query_param, params=params)

    def tensors(self) -> Mapping[str, StoredTensor]:
        return stored_tensors(self.path, self.text.shapes("text."), stored_name)


def stored_name(name: str) -> str | None:
    """``score.weight`` is the head; every other name is the tower's."""
    return "text.head.weight" if name == "score.weight" else text_name(name)


def read_config(config: Section, options: Options) -> TextSpec:
    """The backbone and head that ``config.json`` describes; raises ``CheckpointError``."""
    pooling = config.string("pooling", options.pooling, among=tuple(POOLINGS))
    return read_backbone(
        config, pooling=POOLINGS[pooling], architectures=(SCORING,), head=read_score_head(config)
    )


if TYPE_CHECKING:
    _conforms: type[PairModel] = LlamaNemotronRerank
