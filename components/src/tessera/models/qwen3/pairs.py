"""The pairs of Qwen3's rerankers: a conversation that asks for yes or no, and two rows of the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final

from tessera.checkpoint.safetensors import StoredTensor
from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.checkpoint.weights import stored_tensors
from tessera.errors import CheckpointError
from tessera.models.base import Content, ImagePlan
from tessera.models.declared import score_activation
from tessera.models.decoder import check_architecture
from tessera.models.pairs import PairTower
from tessera.models.prompts import Fixed, Run, Segment
from tessera.models.qwen3.config import TURN_END, TURN_START
from tessera.nn.spec import HeadSpec, TextSpec

_HEAD: Final = "text.head."
_EMBEDDINGS: Final = "text.embed_tokens.weight"
_LOGITS: Final = "lm_head.weight"
_TIED: Final = "tie_word_embeddings"
_SYSTEM: Final = (
    "system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided."
    ' Note that the answer can only be "yes" or "no".'
)


class Qwen3Pairs(PairTower):
    """Base of Qwen3's rerankers; the output is the logit of yes less that of no, or a classifier's one row.

    ``behind_instruction`` stands between the instruction and the query, ``answer`` is what the assistant's
    turn begins with.
    """

    takes_instructions = True
    behind_instruction: ClassVar[str]
    answer: ClassVar[tuple[str, ...]] = ()

    def score_pairs(self, *, instruction: str) -> None:
        """Complete an opened model; raises ``CheckpointError`` for a score that is declared otherwise."""
        assert self.text.head is not None
        self._classifies = not self.text.head.contrast
        if self._classifies and self.declared.labels not in (None, 1):
            config = Section.read(self.path / CONFIG_FILE)
            raise config.error("id2label", f"must have one label, a score, not {self.declared.labels}")
        pooling = self.declared.pooling
        if pooling is not None and pooling.modes != ("lasttoken",):
            mode = " and ".join(map(repr, pooling.modes))
            raise CheckpointError(
                f"{pooling.file}: pooling_mode {mode}: a score of {self.family} is of the last token"
            )
        self.activation = score_activation(self.declared)
        self._instruction = instruction
        tokenizer = self._tokenizer
        self._start, self._end = tokenizer.id_of(TURN_START), tokenizer.id_of(TURN_END)
        self._answer: list[Segment] = [
            tokenizer.id_of(part) if part.startswith("<") else Fixed(part) for part in self.answer
        ]

    def before_pair(self, images: Sequence[ImagePlan]) -> tuple[list[Segment], str]:
        return [
            *(self._start, Fixed(_SYSTEM), self._end, Fixed("\n")),
            *(self._start, Fixed("user\n")),
        ], ""

    def before_query(self, query: Content, param: str) -> str:
        instruction = self._instruction if query.instruction is None else query.instruction
        return f"<Instruct>: {instruction}{self.behind_instruction}"

    def behind_pair(self) -> list[Segment]:
        return [
            *(self._end, Fixed("\n"), self._start, Fixed("assistant\n")),
            *self._answer,
        ]

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """The texts in the prompt's turns: a pair that the client wrote itself."""
        before, _ = self.before_pair(())
        return [*before, Run("", content.text), *self.behind_pair()]

    def tensors(self) -> Mapping[str, StoredTensor]:
        """As ``TowerModel.tensors``; the head is two rows of what makes logits, or the classifier's one."""
        if self._classifies:
            return super().tensors()
        shapes, names = self.stored_shapes(), self.stored_name
        body = {name: shape for name, shape in shapes.items() if not name.startswith(_HEAD)}
        logits = {_LOGITS: shapes[_EMBEDDINGS]}
        try:
            stored = stored_tensors(
                self.path, body | logits, lambda name: name if name == _LOGITS else names(name)
            )
        except CheckpointError as error:
            # Tied to the embeddings, if it is only this that is not there.
            stored = stored_tensors(self.path, body, names)
            config = Section.read(self.path / CONFIG_FILE)
            if not config.flag(_TIED, True):
                # Scores of the embeddings would be plausible, and wrong.
                raise config.error(_TIED, f"is false, and no weights have {_LOGITS!r}") from error
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


def with_head(text: TextSpec, config: Section, *, decoder: str, classifier: str) -> TextSpec:
    """Return the decoder with a head: two rows of the logits, or a classifier's one, by the architecture.

    Raises ``CheckpointError`` for another architecture.
    """
    named = check_architecture(config, (decoder, classifier))
    return replace(text, head=HeadSpec(width=1, contrast=named == decoder))
