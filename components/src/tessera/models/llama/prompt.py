"""The prompts of Nemotron's families: how they begin, and pairs."""

from __future__ import annotations

from collections.abc import Mapping

from tessera.checkpoint.declared import Declared
from tessera.checkpoint.section import Section
from tessera.checkpoint.tokenizer import PlainTokenizer, token_name
from tessera.models.base import Content, Role
from tessera.models.declared import role_prompts
from tessera.models.pairs import PairTower
from tessera.models.prompts import refuse_instruction


def read_prefixes(*sections: Section, declared: Declared) -> Mapping[Role, str]:
    """The prefix of each role, with the trailing space that the configuration leaves out.

    The first of the files that has one wins, then what the checkpoint declares, then the family's own.
    """
    usual = {Role.NONE: "", Role.QUERY: "query: ", Role.PASSAGE: "passage: "}
    return role_prompts(declared, usual, found=found_prefixes(*sections))


def found_prefixes(*sections: Section) -> dict[Role, str]:
    """Return the prefixes that the sections have, of each role from the first that has it, with the space."""
    found = {}
    for role, key in ((Role.QUERY, "query_prefix"), (Role.PASSAGE, "passage_prefix")):
        if section := next((section for section in sections if section.has(key)), None):
            prefix = section.string(key)
            found[role] = f"{prefix} " if prefix else ""
    return found


def bos_of(tokenizer: PlainTokenizer) -> int:
    """The id of the token that ``tokenizer_config.json`` names as the first; raises ``CheckpointError``."""
    return tokenizer.id_of(token_name(tokenizer.path.parent, "bos_token"))


class LlamaPairs(PairTower):
    """Base of Nemotron's rerankers: ``question:{query}``, two line breaks, ``passage:{document}``."""

    between = " \n \n passage"
    # One token may hold the colon and what follows it.
    before_document = ":"

    def before_query(self, query: Content, param: str) -> str:
        refuse_instruction(query, param=param)
        return "question:"
