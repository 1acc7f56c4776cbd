"""A checkpoint of Qwen3-VL-Reranker as the rest of Tessera sees it; importing and opening need no torch.

Behind ``<Query>:`` and ``<Document>:`` stand the images of that side, then its text. The reference computes
the two logits in the model's type, here they are in float32: those of bfloat16 have steps of 0.06 near 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.models.base import Content, Family, ImagePlan
from tessera.models.options import OptionsFamily
from tessera.models.prompts import Segment
from tessera.models.qwen3.pairs import Qwen3Pairs, with_head
from tessera.models.qwen3_vl_embedding.body import ImageOptions, Qwen3VLBody
from tessera.models.qwen3_vl_embedding.config import ModelConfig
from tessera.models.qwen3_vl_embedding.config import read_config as read_body

_CLASSIFIER: Final = "Qwen3VLForSequenceClassification"
_DECODER: Final = "Qwen3VLForConditionalGeneration"


class Options(ImageOptions, frozen=True, forbid_unknown_fields=True):
    """``instruction`` is that of queries that have none.

    ``task`` takes a language model for a reranker whose files do not declare it. ``max_tokens`` bounds a
    pair.
    """

    instruction: str = "Given a search query, retrieve relevant candidates that answer the query."
    task: Literal["auto", "score"] = "auto"
    max_tokens: Annotated[int, msgspec.Meta(ge=128)] = 10_240


class Qwen3VLRerank(Qwen3Pairs, Qwen3VLBody):
    """Implements ``tessera.models.base.PairModel``; either side may have images."""

    family = "qwen3_vl_rerank"
    prefixes = (("score.", "text.head."), *Qwen3VLBody.prefixes)
    behind_instruction = "<Query>:"
    # One token may hold the signs and what follows them.
    between = "\n<Document"
    before_document = ">:"

    def __init__(self, path: Path, options: Options) -> None:
        super().__init__(path, read_config(path), options)
        self.score_pairs(instruction=options.instruction)

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """As the base; images of a pair that the client wrote itself stand where it has them."""
        if not content.images:
            return super().segments(content, param=param)
        # Without the beginning of the user's turn, which is there again.
        (*before, _), _ = self.before_pair(())
        return [*before, *self.user(content), *self.behind_pair()]

    def side_images(self, images: Sequence[ImagePlan], param: str) -> list[Segment]:
        self.check_grids(images, param)
        return self.marked(images)


def read_config(directory: Path) -> ModelConfig:
    """Read the configuration in ``directory``, with the decoder's head; raises ``CheckpointError``."""
    body = read_body(directory, (_DECODER, _CLASSIFIER))
    config = Section.read(directory / CONFIG_FILE)
    return replace(body, text=with_head(body.text, config, decoder=_DECODER, classifier=_CLASSIFIER))


FAMILY: Family = OptionsFamily(
    model_types=("qwen3_vl",),
    hub_models=("Qwen/Qwen3-VL-Reranker-2B", "Qwen/Qwen3-VL-Reranker-8B"),
    options=Options,
    opened=Qwen3VLRerank,
    architectures=(_DECODER, _CLASSIFIER),
    task="score",
)
