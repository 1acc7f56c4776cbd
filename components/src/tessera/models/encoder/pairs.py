"""Cross-encoders: a query and a document in one input, to a score."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tessera.checkpoint.declared import read_declared
from tessera.checkpoint.section import Section
from tessera.errors import InvalidInput
from tessera.models.base import Content, Int32Array, OutputKind, PairLimits, Prompt
from tessera.models.declared import score_activation
from tessera.models.encoder.config import read_encoder
from tessera.models.encoder.model import EncoderModel, PairOptions
from tessera.models.prompts import Run, Segment, refuse_unless_truncating, shorten, side_text, texts_of
from tessera.models.tower import CONFIG_FILE
from tessera.nn.spec import HeadSpec

if TYPE_CHECKING:
    from tessera.models.base import PairModel


class CrossEncoder(EncoderModel):
    """Base of cross-encoders; ``separators`` last tokens stand between the query and the document.

    With ``typed`` what stands behind the first of them is of type 1.
    """

    kind = OutputKind.SCORE
    separators: ClassVar[int] = 1
    typed: ClassVar[bool] = True

    def __init__(self, path: Path, options: PairOptions) -> None:
        """Read configuration and tokenizer; the weights are not looked at. Raises ``CheckpointError``."""
        config = Section.read(path / CONFIG_FILE)
        text = read_encoder(config, pooling="first", head=HeadSpec(width=1, bias=True))
        self._open(config, text, read_declared(path), options)
        if self.declared.labels != 1:
            raise config.error("id2label", f"must have one label, a score, not {self.declared.labels or 2}")
        chosen = options.activation
        self.activation = score_activation(self.declared) if chosen == "declared" else chosen

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """The texts between the two tokens: what has no query."""
        return [self._first, Run("", "".join(texts_of(content))), self._last]

    def types(self, tokens: Int32Array) -> Int32Array:
        """int32 ``[tokens]``: 1 behind the query's last token, where sides have types."""
        if not self.typed or self._types == 1:
            return super().types(tokens)
        ends = tokens == self._last
        types: Int32Array = (np.cumsum(ends, dtype=np.int32) > ends).astype(np.int32)
        return types

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
        asked, cut = self._side(query, limits.query, query_param)
        head = np.array([self._first, *asked, *(self._last,) * self.separators], np.int32)
        if len(head) + 1 >= limits.tokens:
            raise InvalidInput(
                f"{query_param} takes {len(head) + 1} tokens with its prompt, which leaves no room for a"
                f" document within the limit of {limits.tokens}",
                param=query_param,
            )
        prompts: list[Prompt | InvalidInput] = []
        for document, param in zip(documents, params, strict=True):
            try:
                prompts.append(self._pair(head, document, limits, param, cut=cut))
            except InvalidInput as error:
                prompts.append(error)
        return prompts

    def _pair(
        self, head: Int32Array, document: Content, limits: PairLimits, param: str, *, cut: bool
    ) -> Prompt:
        told, shortened = self._side(document, limits.document, param)
        room = limits.tokens - len(head) - 1
        if len(told) > room:
            refuse_unless_truncating(len(head) + len(told) + 1, limits.tokens, limits.truncate, param)
            told, shortened = shorten(told, room, limits.truncate), True
        tokens = np.concatenate((head, told, np.array([self._last], np.int32)))
        return Prompt(tokens=tokens, image_tokens=0, truncated=cut or shortened)

    def _side(self, side: Content, most: int | None, param: str) -> tuple[Int32Array, bool]:
        """Return the tokens of a side, and whether a bound of its own has cut them."""
        ids = self._tokenizer.ids(side_text(side, images=False, lacking=self.lacking, param=param))
        return (ids, False) if most is None or len(ids) <= most else (ids[:most], True)


if TYPE_CHECKING:
    _conforms: type[PairModel] = CrossEncoder
