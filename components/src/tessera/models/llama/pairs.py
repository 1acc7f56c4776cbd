"""The prompts of Nemotron's pairs: ``question:{query}``, two line breaks, ``passage:{document}``."""

from __future__ import annotations

from tessera.models.base import Content
from tessera.models.pairs import PairTower
from tessera.models.prompts import refuse_instruction


class LlamaPairs(PairTower):
    """Base of Nemotron's rerankers."""

    between = " \n \n passage"
    # One token may hold the colon and what follows it.
    before_document = ":"

    def before_query(self, query: Content, param: str) -> str:
        refuse_instruction(query, param=param)
        return "question:"
