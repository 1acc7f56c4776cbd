"""A reranker: bytes of the query, a zero, bytes of the document; its score is their mean, scaled by ten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.errors import InvalidInput
from tessera.models import base
from tessera.models.base import Content, Output, OutputKind, Prompt, TextTensors, Truncate
from tests.families.dual_encoder import DualEncoder, weights
from tests.families.seeded import SeededFamily

if TYPE_CHECKING:
    from tessera.models.base import PairModel

SEPARATOR = 0


class Pairs(DualEncoder):
    family = "pairs"
    output = Output(kind=OutputKind.SCORE, width=1, unit_length=False)

    def pairs(self, pairs: base.Pairs) -> list[Prompt | InvalidInput]:
        limits = pairs.limits
        asked = self._side(pairs.query, limits.query, pairs.param)
        made: list[Prompt | InvalidInput] = []
        for document, param in zip(pairs.documents, pairs.params, strict=True):
            try:
                found = self._side(document, limits.document, param)
            except InvalidInput as error:
                made.append(error)
                continue
            room = limits.tokens - len(asked.tokens) - 1
            tokens = found.tokens if limits.truncate is Truncate.NONE else found.tokens[:room]
            if len(tokens) > room:
                made.append(InvalidInput(f"{param}: {len(tokens)} tokens, over {room}", param=param))
                continue
            made.append(
                Prompt(
                    tokens=np.concatenate([asked.tokens, [np.int32(SEPARATOR)], tokens]),
                    image_tokens=asked.image_tokens + found.image_tokens,
                )
            )
        return made

    def _side(self, content: Content, bound: int | None, param: str) -> Prompt:
        made = self.prompt(content, max_tokens=self.max_tokens, truncate=Truncate.NONE, param=param)
        return made if bound is None else Prompt(tokens=made.tokens[:bound], image_tokens=made.image_tokens)

    def load_text(self, *, dtype: str, device: str) -> Any:
        forward = super().load_text(dtype=dtype, device=device)

        def scores(batch: TextTensors) -> Any:
            return forward(batch).mean(1, keepdim=True) * 10

        return scores


def score(seed: int, query: str, document: str) -> float:
    """The score by plain numpy."""
    return float(weights(seed)["tokens"][list(f"{query}\0{document}".encode())].mean() * 10)


FAMILY = SeededFamily("pairs", Pairs)

if TYPE_CHECKING:
    _conforms: type[PairModel] = Pairs
