"""The prompts of rerankers that read a query and a document as one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from tessera.errors import InvalidInput
from tessera.models.base import Content, ImagePlan, OutputKind, PairLimits, Pairs, Prompt
from tessera.models.prompts import Fixed, Run, Segment, Tokens, check_text, each_prompt, side_text
from tessera.models.tower import TowerModel

if TYPE_CHECKING:
    from tessera.models.base import PairModel

# A byte is one token at most, and NFC makes three bytes at most of one.
_TOKENS_OF_BYTE: Final = 3

_Head = tuple[list[Segment], str]
"""What stands before all documents of a query: tokens, and the text that is tokenised with the document's."""


class PairTower(TowerModel):
    """Base of rerankers: a side is of texts, and of images where the family has some.

    ``between`` stands behind the query, and ``before_document`` behind that and before the document, with
    which it is tokenised: a word ends between the two.
    """

    kind = OutputKind.SCORE
    between: ClassVar[str]
    before_document: ClassVar[str]

    def before_pair(self, images: Sequence[ImagePlan]) -> tuple[list[Segment], str]:
        """What stands before the text of a pair with these images: segments, and how the text begins."""
        raise NotImplementedError

    def before_query(self, query: Content, param: str) -> str:
        """What stands before a query; raises ``InvalidInput`` for an instruction that is not taken."""
        raise NotImplementedError

    def side_images(self, images: Sequence[ImagePlan], param: str) -> list[Segment]:
        """A side's images, where they stand before its text; none where all begin the pair.

        Raises ``InvalidInput`` naming ``param`` for images that the family does not take.
        """
        return []

    def behind_pair(self) -> list[Segment]:
        """What stands behind the document."""
        return []

    def pairs(self, asked: Pairs) -> list[Prompt | InvalidInput]:
        """As ``tessera.models.base.PairModel.pairs``."""
        query, limits, param = asked.query, asked.limits, asked.param
        check_text(query.instruction or "", param)
        before = self.before_query(query, param)
        whole = self._text(replace(query, instruction=None), param)
        question = self._bounded(before, whole, limits.query)
        images = self.side_images(query.images, param)
        begins = [self.before_pair((*query.images, *document.images)) for document in asked.documents]
        text = f"{question}{self.between}"
        heads = {
            begin: self._head(begin + before, images, text, limits, param)
            for begin in dict.fromkeys(begin for _, begin in begins)
        }
        cut = question != whole
        return each_prompt(
            partial(self._pair, segments, heads[begin], document, limits, name, cut=cut)
            for (segments, begin), document, name in zip(begins, asked.documents, asked.params, strict=True)
        )

    def _text(self, side: Content, param: str) -> str:
        return side_text(side, images=self.placeholder is not None, lacking=self.lacking, param=param)

    def _bounded(self, before: str, text: str, most: int | None) -> str:
        """The beginning of a text that has at most so many tokens behind ``before``."""
        if most is None or _TOKENS_OF_BYTE * len(text.encode()) <= most:
            return text
        offsets = self._tokenizer.encode(before + text).offsets
        inside = [span for span in offsets if span[1] > len(before)]
        return text if len(inside) <= most else text[: max(0, inside[most][0] - len(before))]

    def _head(self, before: str, images: list[Segment], text: str, limits: PairLimits, param: str) -> _Head:
        """What every prompt has before its document; raises ``InvalidInput`` if it leaves that no room."""
        first: list[Segment] = [Fixed(before), *images] if images else []
        text = text if images else before + text
        tokens = self._tokenizer.ids(text)
        length = len(tokens) + sum(image.rows for image in images if isinstance(image, ImagePlan))
        if length >= limits.tokens:
            raise InvalidInput(
                f"{param} takes {length} tokens with its prompt, which leaves no room for a document"
                f" within the limit of {limits.tokens}",
                param=param,
            )
        if self._tokenizer.cuts_behind_words:
            return [*first, Tokens(tokens)], self.before_document
        return first, f"{text}{self.before_document}"

    def _pair(
        self,
        first: list[Segment],
        head: _Head,
        document: Content,
        limits: PairLimits,
        param: str,
        *,
        cut: bool,
    ) -> Prompt:
        segments, before = head
        text = self._text(document, param)
        passage = self._bounded(self.before_document, text, limits.document)
        images = self.side_images(document.images, param)
        if images:
            images, before = [Fixed(before), *images], ""
        prompt = self._assembler.prompt(
            [*first, *segments, *images, Run(before, passage), *self.behind_pair()],
            max_tokens=limits.tokens,
            truncate=limits.truncate,
            param=param,
        )
        return replace(prompt, truncated=True) if cut or passage != text else prompt


if TYPE_CHECKING:
    _conforms: type[PairModel] = PairTower
