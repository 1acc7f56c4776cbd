"""A checkpoint of Llama Nemotron ColEmbed VL as the rest of Tessera sees it; opening needs no torch.

The layout of a prompt is that of ``llama_nemotron_vl``, but for the prefix, which stands before the images
and again behind them::

    images          BOS  p  (<img> placeholders </img>, " " between two of them)  " " + p + text
"""

from __future__ import annotations

from tessera.models.base import Content, Family, OutputKind
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera.models.options import NoOptions, OptionsFamily
from tessera.models.prompts import Run, Segment


class LlamaNemotronColEmbedVL(LlamaNemotronVL):
    """Implements ``tessera.models.base.Model``; its output is a vector of each token, prefixes included."""

    family = "llama_nemotron_colembed_vl"
    kind = OutputKind.TOKENS

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        if not content.images:
            return super().segments(content, param=param)
        prefix = content.prompt_of(self.prompts)
        again = prefix if self.strips_after_image else f" {prefix}"
        run = Run(again, content.text)
        return [*self.before_text(prefix, content.images), run]


FAMILY: Family = OptionsFamily(
    name=LlamaNemotronColEmbedVL.family,
    model_types=("llama_nemotron_vl",),
    hub_models=("nvidia/llama-nemotron-colembed-vl-3b-v2",),
    options=NoOptions,
    opened=LlamaNemotronColEmbedVL,
    architectures=("LlamaNemotronColEmbedVLModel",),
)
