"""The prompts of pairs: ``question:{query}``, two line breaks, ``passage:{document}``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tessera.errors import InvalidInput
from tessera.models.base import Content, ImagePlan, OutputKind, PairLimits, Prompt
from tessera.models.prompts import Run, Segment, Tokens, side_text
from tessera.models.tower import TowerModel

if TYPE_CHECKING:
    from tessera.models.base import PairModel

_BEFORE_QUERY: Final = "question:"
_BETWEEN: Final = " \n \n passage"
_BEFORE_DOCUMENT: Final = ":"

# A byte is one token at most, and NFC makes three bytes at most of one.
_TOKENS_OF_BYTE: Final = 3

_Head = tuple[list[Segment], str]
"""What stands before all documents of a query: tokens, and the text that is tokenised with the document's."""


class PairTower(TowerModel):
    """Base of rerankers: a side is of texts, and of images where the family has some."""

    kind = OutputKind.SCORE

    def before_pair(self, images: Sequence[ImagePlan]) -> tuple[list[Segment], str]:
        """What stands before the text of a pair with these images: segments, and how the text begins."""
        raise NotImplementedError

    def pairs(
        self,
        query: Content,
        documents: Sequence[Content],
        *,
        limits: PairLimits,
        query_param: str,
        params: Sequence[str],
    ) -> list[Prompt | InvalidInput]:
        """As ``tessera.models.base.PairModel.pairs``."""
        asked = self._text(query, query_param)
        question = self._bounded(_BEFORE_QUERY, asked, limits.query)
        heads: dict[str, _Head] = {}
        made: list[Prompt | InvalidInput] = []
        for document, param in zip(documents, params, strict=True):
            segments, begin = self.before_pair((*query.images, *document.images))
            if begin not in heads:
                heads[begin] = self._head(f"{begin}{_BEFORE_QUERY}{question}{_BETWEEN}", limits, query_param)
            try:
                made.append(self._pair(segments, heads[begin], document, limits, param))
            except InvalidInput as error:
                made.append(error)
        if question == asked:
            return made
        return [replace(each, truncated=True) if isinstance(each, Prompt) else each for each in made]

    def _text(self, side: Content, param: str) -> str:
        return side_text(side, images=self.placeholder is not None, lacking=self.lacking, param=param)

    def _bounded(self, before: str, text: str, most: int | None) -> str:
        """The beginning of a text that has at most so many tokens behind ``before``."""
        if most is None or _TOKENS_OF_BYTE * len(text.encode()) <= most:
            return text
        offsets = self._tokenizer.encode(before + text).offsets
        inside = [span for span in offsets if span[1] > len(before)]
        return text if len(inside) <= most else text[: max(0, inside[most][0] - len(before))]

    def _head(self, text: str, limits: PairLimits, param: str) -> _Head:
        """What every prompt has before its document; raises ``InvalidInput`` if it leaves that no room."""
        tokens = self._tokenizer.ids(text)
        if len(tokens) >= limits.tokens:
            raise InvalidInput(
                f"{param} takes {len(tokens)} tokens with its prompt, which leaves no room for a document"
                f" within the limit of {limits.tokens}",
                param=param,
            )
        # The colon goes with the document: one token may hold both.
        if self._tokenizer.cuts_behind_words:
            return [Tokens(tokens)], _BEFORE_DOCUMENT
        return [], f"{text}{_BEFORE_DOCUMENT}"

    def _pair(
        self, first: list[Segment], head: _Head, document: Content, limits: PairLimits, param: str
    ) -> Prompt:
        segments, before = head
        text = self._text(document, param)
        passage = self._bounded(_BEFORE_DOCUMENT, text, limits.document)
        prompt = self._assembler.prompt(
            [*first, *segments, Run(before, passage)],
            max_tokens=limits.tokens,
            truncate=limits.truncate,
            param=param,
        )
        return prompt if passage == text else replace(prompt, truncated=True)


if TYPE_CHECKING:
    _conforms: type[PairModel] = PairTower
