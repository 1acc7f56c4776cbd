"""A checkpoint of Llama Nemotron Rerank as the rest of Tessera sees it; opening needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.models.base import Content, Family, ImagePlan
from tessera.models.llama.config import SCORING
from tessera.models.llama.pairs import LlamaPairs
from tessera.models.llama_nemotron_embed.model import LlamaNemotronEmbed
from tessera.models.llama_nemotron_embed.model import Options as Options
from tessera.models.options import OptionsFamily
from tessera.models.prompts import Run, Segment


class LlamaNemotronRerank(LlamaPairs, LlamaNemotronEmbed):
    """Implements ``tessera.models.base.PairModel``; its output is the raw logit of a pair."""

    family = "llama_nemotron_rerank"

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """BOS and the texts as they are: a prompt that the client made."""
        return self.between_marks(Run("", content.text))

    def before_pair(self, images: Sequence[ImagePlan]) -> tuple[list[Segment], str]:
        return [*self.marks.before], ""


FAMILY: Family = OptionsFamily(
    name=LlamaNemotronRerank.family,
    model_types=("llama_bidirec",),
    hub_models=("nvidia/llama-nemotron-rerank-1b-v2",),
    options=Options,
    opened=LlamaNemotronRerank,
    architectures=(SCORING,),
)
