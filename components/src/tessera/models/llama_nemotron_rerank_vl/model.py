"""A checkpoint of Llama Nemotron Rerank VL as the rest of Tessera sees it; opening needs no torch.

The layout of a pair, where either side may have images::

    texts           BOS  question:{query}\\n\\npassage:{document}
    images          BOS  (<img> placeholders </img>, " " between two of them)  " " + the same

with a space on either side of each line break. Images of the query stand first.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera.models.base import Family, ImagePlan
from tessera.models.llama.pairs import LlamaPairs
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera.models.options import NoOptions, OptionsFamily
from tessera.models.prompts import Segment


class LlamaNemotronRerankVL(LlamaPairs, LlamaNemotronVL):
    """Implements ``tessera.models.base.PairModel``; its output is the raw logit of a pair."""

    family = "llama_nemotron_rerank_vl"

    def before_pair(self, images: Sequence[ImagePlan]) -> tuple[list[Segment], str]:
        if not images:
            return [*self.marks.before], ""
        return self.before_text("", images), "" if self.strips_after_image else " "


FAMILY: Family = OptionsFamily(
    name=LlamaNemotronRerankVL.family,
    model_types=("llama_nemotron_vl_rerank",),
    hub_models=("nvidia/llama-nemotron-rerank-vl-1b-v2",),
    options=NoOptions,
    opened=LlamaNemotronRerankVL,
)
