"""A checkpoint of Qwen3-Reranker as the rest of Tessera sees it; opening needs no torch.

Three layouts are published: a language model alone; the same with the modules that
``sentence-transformers`` saves, which name the two tokens; and a classifier, whose one row is the
difference of theirs (``Qwen3ForSequenceClassification``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.models.base import Family
from tessera.models.decoder import max_positions
from tessera.models.options import OptionsFamily
from tessera.models.qwen3.config import DEFAULT_TASK, read_text
from tessera.models.qwen3.pairs import Qwen3Pairs, with_head
from tessera.nn.spec import TextSpec

_CLASSIFIER: Final = "Qwen3ForSequenceClassification"
_DECODER: Final = "Qwen3ForCausalLM"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``instruction`` is that of queries that have none.

    ``task`` takes a language model for a reranker whose files do not declare it. ``max_tokens`` bounds a
    pair.
    """

    instruction: str = DEFAULT_TASK
    task: Literal["auto", "score"] = "auto"
    max_tokens: Annotated[int, msgspec.Meta(ge=128)] = 8_192


class Qwen3Rerank(Qwen3Pairs):
    """Implements ``tessera.models.base.PairModel``."""

    family = "qwen3_rerank"
    behind_instruction = "\n<Query>: "
    between = "\n<Document>:"
    before_document = " "
    answer = ("<think>", "\n\n", "</think>", "\n\n")

    def __init__(self, path: Path, options: Options) -> None:
        config = Section.read(path / CONFIG_FILE)
        text = read_config(config)
        super().__init__(path, text, options, max_tokens=min(options.max_tokens, max_positions(config)))
        self.score_pairs(instruction=options.instruction)


def read_config(config: Section) -> TextSpec:
    """The decoder that ``config.json`` describes, with its head; raises ``CheckpointError``."""
    text = read_text(config, sections=False)
    return with_head(text, config, decoder=_DECODER, classifier=_CLASSIFIER)


FAMILY: Family = OptionsFamily(
    model_types=("qwen3",),
    hub_models=("Qwen/Qwen3-Reranker-0.6B", "Qwen/Qwen3-Reranker-4B", "Qwen/Qwen3-Reranker-8B"),
    options=Options,
    opened=Qwen3Rerank,
    architectures=(_DECODER, _CLASSIFIER),
    task="score",
)
