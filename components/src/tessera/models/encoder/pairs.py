"""Cross-encoders: a query and a document in one input, to a score."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tessera.checkpoint.declared import read_declared
from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.checkpoint.tokenizer_class import TOKENIZER_CONFIG_FILE, tokenizer_class
from tessera.errors import CheckpointError, InvalidInput
from tessera.models.base import Content, Int32Array, OutputKind, PairLimits, Pairs, Prompt, Truncate
from tessera.models.declared import score_activation
from tessera.models.encoder.body import body_of
from tessera.models.encoder.config import read_encoder
from tessera.models.encoder.model import TWO_ENDS, EncoderModel, PairOptions
from tessera.models.marks import Marks, pair_marks_of
from tessera.models.prompts import (
    Run,
    Segment,
    each_prompt,
    refuse_unless_truncating,
    shorten,
    side_text,
)
from tessera.nn.spec import HeadSpec

if TYPE_CHECKING:
    from tessera.models.base import PairModel


class CrossEncoder(EncoderModel):
    """Base of cross-encoders; ``separators`` last tokens stand between the query and the document.

    With ``typed`` what stands behind the first of them is of type 1. The default prompt that a checkpoint
    declares stands before the query, as in the reference.
    """

    kind = OutputKind.SCORE
    separators: ClassVar[int] = 1
    typed: ClassVar[bool] = True

    def __init__(self, path: Path, options: PairOptions) -> None:
        """Read configuration and tokenizer; the weights are not looked at. Raises ``CheckpointError``."""
        config = Section.read(path / CONFIG_FILE)
        body = body_of(config)
        head = HeadSpec(width=1, bias=True, dense=body.score_activation)
        text = read_encoder(config, body, pooling="first", head=head)
        self._open(config, text, read_declared(path), options, max_tokens=options.max_tokens)
        if self.declared.labels != 1:
            raise config.error("id2label", f"must have one label, a score, not {self.declared.labels or 2}")
        first, self._last = self._two_ends()
        if tokenizer_class(path) not in TWO_ENDS:
            self._check_pair(first)
        self._first_token = np.array([first], np.int32)
        self._untyped = self.typed and text.types > 1 and not gives_types(path)
        chosen = options.activation
        self.activation = score_activation(self.declared) if chosen == "declared" else chosen
        default = self.declared.default_prompt
        self._before = "" if default is None else self.declared.prompts.get(default, "")

    def _check_pair(self, first: int) -> None:
        """Raise ``CheckpointError`` for a tokenizer whose file joins a pair in another way."""
        between = (self._last,) * self.separators
        found = pair_marks_of(self._tokenizer)
        if found != (Marks((first,), (self._last,)), between):
            raise CheckpointError(
                f"{self._tokenizer.path}: post_processor joins a pair by {found[1]}, and family {self.family}"
                f" by {between}"
            )

    @property
    def head_names(self) -> Mapping[str, str]:
        return dict(zip(self._body.score, ("head.dense.", "head."), strict=True))

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """The texts between the two tokens: what has no query."""
        return [*self.marks.before, Run("", content.text), *self.marks.behind]

    def types(self, tokens: Int32Array) -> Int32Array:
        """int32 ``[tokens]``: 1 behind the query's last token, where sides have types.

        A tokenizer may declare inputs of models without types.
        """
        if not self.typed or self._untyped or self._types < 2:
            return super().types(tokens)
        ends = tokens == self._last
        types: Int32Array = (np.cumsum(ends, dtype=np.int32) > ends).astype(np.int32)
        return types

    def pairs(self, asked: Pairs) -> list[Prompt | InvalidInput]:
        """As ``tessera.models.base.PairModel.pairs``."""
        limits, param = asked.limits, asked.param
        query, cut = self._side(asked.query, limits.query, param, before=self._before)
        room = limits.tokens - self.separators - 2
        if room < 2 or (limits.truncate is Truncate.NONE and len(query) >= room):
            raise InvalidInput(
                f"{param} takes {limits.tokens - room + len(query)} tokens with its prompt, which"
                f" leaves no room for a document within the limit of {limits.tokens}",
                param=param,
            )
        return each_prompt(
            partial(self._pair, query, document, limits, name, room=room, cut=cut)
            for document, name in zip(asked.documents, asked.params, strict=True)
        )

    def _pair(
        self, asked: Int32Array, document: Content, limits: PairLimits, param: str, *, room: int, cut: bool
    ) -> Prompt:
        told, shortened = self._side(document, limits.document, param)
        length = len(asked) + len(told)
        if length > room:
            fixed = limits.tokens - room
            refuse_unless_truncating(fixed + length, limits.tokens, limits.truncate, param)
            kept = longest_first(len(asked), len(told), room)
            asked, told = (
                shorten(side, keep, limits.truncate) for side, keep in zip((asked, told), kept, strict=True)
            )
            shortened = True
        between = np.full(self.separators, self._last, np.int32)
        tokens = np.concatenate((self._first_token, asked, between, told, between[:1]))
        return Prompt(tokens=tokens, image_tokens=0, truncated=cut or shortened)

    def _side(
        self, side: Content, most: int | None, param: str, *, before: str = ""
    ) -> tuple[Int32Array, bool]:
        """Return the tokens of a side with what is put before it, and whether a bound of its own cut them."""
        text = side_text(side, images=False, lacking=self.lacking, param=param)
        ids = self._tokenizer.ids(before + text)
        return (ids, False) if most is None or len(ids) <= most else (ids[:most], True)


def gives_types(path: Path) -> bool:
    """Whether the tokenizer says of which text of a pair a token is; raises ``CheckpointError``.

    The settings say it, else the class of the tokenizer: BERT's does, others do not. The general one of
    transformers 4.57 did, and that of 5 does not.
    """
    settings = Section.read(path / TOKENIZER_CONFIG_FILE, optional=True)
    inputs = settings.values.get("model_input_names")
    if isinstance(inputs, list):
        return "token_type_ids" in inputs
    name = tokenizer_class(path)
    if name == "PreTrainedTokenizer":
        raise settings.error(
            "model_input_names",
            "is missing; releases of transformers differ in whether PreTrainedTokenizerFast gives a pair's"
            ' tokens types: ["input_ids", "token_type_ids", "attention_mask"] says that it does',
        )
    return name in ("BertTokenizer", "ElectraTokenizer")


def longest_first(query: int, document: int, room: int) -> tuple[int, int]:
    """Return how many tokens of either side stay of a pair that has more than ``room``.

    The longer side is cut to the length of the other, then both, as the reference's tokenizers do.
    """
    less = min(query, document, room // 2)
    return (less, room - less) if query <= document else (room - less, less)


if TYPE_CHECKING:
    _conforms: type[PairModel] = CrossEncoder
