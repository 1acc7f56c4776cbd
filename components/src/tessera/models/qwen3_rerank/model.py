"""A checkpoint of Qwen3-Reranker as the rest of Tessera sees it; opening needs no torch.

Three layouts are published: a language model alone; the same with the modules that
``sentence-transformers`` saves, which name the two tokens; and a classifier, whose one row is the
difference of theirs (``Qwen3ForSequenceClassification``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from tessera.checkpoint.safetensors import StoredTensor
from tessera.checkpoint.section import Section
from tessera.checkpoint.tokenizer import PlainTokenizer
from tessera.checkpoint.weights import stored_tensors
from tessera.errors import CheckpointError
from tessera.models.base import Content, Family, ImagePlan
from tessera.models.declared import score_activation
from tessera.models.decoder import max_positions
from tessera.models.options import OptionsFamily
from tessera.models.pairs import PairTower
from tessera.models.prompts import Fixed, Run, Segment, texts_of
from tessera.models.qwen3.config import DEFAULT_TASK, THETA, read_text
from tessera.models.qwen3.tokenizer import TURN_END, TURN_START
from tessera.models.stored_names import text_name
from tessera.models.tower import CONFIG_FILE
from tessera.nn.spec import HeadSpec, TextSpec

_CLASSIFIER: Final = "Qwen3ForSequenceClassification"
_DECODER: Final = "Qwen3ForCausalLM"
_HEAD: Final = "text.head."
_EMBEDDINGS: Final = "text.embed_tokens.weight"
_LOGITS: Final = "lm_head.weight"
_SYSTEM: Final = (
    "system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided."
    ' Note that the answer can only be "yes" or "no".'
)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``instruction`` is that of queries that have none.

    ``task`` takes a language model for a reranker whose files do not declare it. ``max_tokens`` bounds a
    pair.
    """

    instruction: str = DEFAULT_TASK
    task: Literal["auto", "score"] = "auto"
    max_tokens: Annotated[int, msgspec.Meta(ge=128)] = 8_192


class Qwen3Rerank(PairTower):
    """Implements ``tessera.models.base.PairModel``; its output is the logit of yes less that of no."""

    family = "qwen3_rerank"
    revision = "qwen3_rerank 1"
    takes_instructions = True
    between = "\n<Document>:"
    before_document = " "

    def __init__(self, path: Path, options: Options) -> None:
        """Read configuration and tokenizer; the weights are not looked at. Raises ``CheckpointError``."""
        config = Section.read(path / CONFIG_FILE)
        text = read_config(config)
        tokenizer = PlainTokenizer.read(path, vocab_size=text.vocab_size)
        max_tokens = min(options.max_tokens, max_positions(config))
        super().__init__(path, text, tokenizer, options, max_tokens=max_tokens, dimensions=frozenset())
        assert text.head is not None
        self._classifies = not text.head.contrast
        if self._classifies and self.declared.labels not in (None, 1):
            raise config.error("id2label", f"must have one label, a score, not {self.declared.labels}")
        pooling = self.declared.pooling
        if pooling is not None and pooling.modes != ("lasttoken",):
            mode = " and ".join(map(repr, pooling.modes))
            raise CheckpointError(
                f"{pooling.file}: pooling_mode {mode}: a score of {self.family} is of the last token"
            )
        self.activation = score_activation(self.declared)
        self._instruction = options.instruction
        self._start, self._end = tokenizer.id_of(TURN_START), tokenizer.id_of(TURN_END)
        self._thought = tuple(tokenizer.id_of(name) for name in ("<think>", "</think>"))

    def before_pair(self, images: Sequence[ImagePlan]) -> tuple[list[Segment], str]:
        return [
            *(self._start, Fixed(_SYSTEM), self._end, Fixed("\n")),
            *(self._start, Fixed("user\n")),
        ], ""

    def before_query(self, query: Content, param: str) -> str:
        instruction = self._instruction if query.instruction is None else query.instruction
        return f"<Instruct>: {instruction}\n<Query>: "

    def behind_pair(self) -> list[Segment]:
        begin, end = self._thought
        return [
            *(self._end, Fixed("\n"), self._start, Fixed("assistant\n")),
            *(begin, Fixed("\n\n"), end, Fixed("\n\n")),
        ]

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """The texts in the prompt's turns: a pair that the client wrote itself."""
        before, _ = self.before_pair(())
        return [*before, Run("", "".join(texts_of(content))), *self.behind_pair()]

    def tensors(self) -> Mapping[str, StoredTensor]:
        """As ``TowerModel.tensors``; the head is two rows of what makes logits, or the classifier's one."""
        shapes = self.text.shapes("text.")
        if self._classifies:
            return stored_tensors(self.path, shapes, text_name)
        body = {name: shape for name, shape in shapes.items() if not name.startswith(_HEAD)}
        logits = {_LOGITS: shapes[_EMBEDDINGS]}
        try:
            stored = stored_tensors(self.path, body | logits, _with_logits)
        except CheckpointError:
            # Tied to the embeddings, if it is only this that is not there.
            stored = stored_tensors(self.path, body, text_name)
        of_tokens = stored.pop(_LOGITS, None) or stored[_EMBEDDINGS]
        yes, no = self._answers()
        return {**stored, f"{_HEAD}weight": of_tokens.row(yes), f"{_HEAD}against": of_tokens.row(no)}

    def _answers(self) -> tuple[int, int]:
        """Return the tokens of yes and no; raises ``CheckpointError``."""
        declared = self.declared.logit_score
        if declared is not None:
            if declared.false_token is None:
                raise CheckpointError(f"{self.path}: declares a score of one token, which is not supported")
            found: tuple[int | None, int | None] = declared.true_token, declared.false_token
        else:
            vocabulary = self._tokenizer.tokenizer
            found = vocabulary.token_to_id("yes"), vocabulary.token_to_id("no")
        yes, no = found
        if yes is None or no is None or max(yes, no) >= self.text.vocab_size:
            raise CheckpointError(f"{self._tokenizer.path}: lacks the tokens yes and no")
        return yes, no


def read_config(config: Section) -> TextSpec:
    """The decoder that ``config.json`` describes, with its head; raises ``CheckpointError``."""
    named = config.values.get("architectures") or [_DECODER]
    if named not in ([_DECODER], [_CLASSIFIER]):
        raise config.error("architectures", f"must be [{_DECODER!r}] or [{_CLASSIFIER!r}]")
    text = read_text(config, theta=THETA, sections=False)
    return replace(text, head=HeadSpec(width=1, contrast=named == [_DECODER]))


def _with_logits(name: str) -> str | None:
    return name if name == _LOGITS else text_name(name)


FAMILY: Family = OptionsFamily(
    name=Qwen3Rerank.family,
    model_types=("qwen3",),
    hub_models=("Qwen/Qwen3-Reranker-0.6B", "Qwen/Qwen3-Reranker-4B", "Qwen/Qwen3-Reranker-8B"),
    options=Options,
    opened=Qwen3Rerank,
    architectures=(_DECODER, _CLASSIFIER),
    task="score",
)
