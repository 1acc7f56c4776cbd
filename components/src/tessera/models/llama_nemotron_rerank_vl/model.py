"""A checkpoint of Llama Nemotron Rerank VL as the rest of Tessera sees it; opening needs no torch.

The layout of a pair, where either side may have images::

    texts           BOS  question:{query}\\n\\npassage:{document}
    images          BOS  (<img> placeholders </img>, " " between two of them)  " " + the same

with a space on either side of each line break. Images of the query stand first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

from tessera.models.base import Content, ImagePlan, OutputKind, PairLimits, Prompt
from tessera.models.llama.pairs import PairPrompts
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera.models.prompts import Segment

if TYPE_CHECKING:
    from tessera.errors import InvalidInput
    from tessera.models.base import PairModel

FAMILY_NAME: Final = "llama_nemotron_rerank_vl"


class LlamaNemotronRerankVL(LlamaNemotronVL):
    """Implements ``tessera.models.base.PairModel``; its output is the raw logit of a pair."""

    family = FAMILY_NAME
    revision = "llama_nemotron_rerank_vl 1"
    kind = OutputKind.SCORE

    @cached_property
    def _pairs(self) -> PairPrompts:
        return PairPrompts(
            tokenizer=self._tokenizer, assembler=self._assembler, first=self._first, takes_images=True
        )

    def _first(self, images: Sequence[ImagePlan]) -> tuple[list[Segment], str]:
        if not images:
            return [self._controls.bos], ""
        return self.before_text("", images), "" if self._controls.strips_after_image else " "

    def pairs(
        self,
        query: Content,
        documents: Sequence[Content],
        *,
        limits: PairLimits,
        query_param: str,
        params: Sequence[str],
    ) -> list[Prompt | InvalidInput]:
        """A side is of texts and images: token ids and an instruction are refused."""
        return self._pairs.prompts(query, documents, limits=limits, query_param=query_param, params=params)


if TYPE_CHECKING:
    _conforms: type[PairModel] = LlamaNemotronRerankVL
