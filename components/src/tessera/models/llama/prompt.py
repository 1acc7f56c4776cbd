"""How the prompts of these families begin: BOS, then the role's prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tessera.checkpoint.declared import Declared
from tessera.checkpoint.section import Section
from tessera.checkpoint.tokenizer import PlainTokenizer, token_name
from tessera.models.base import Role
from tessera.models.declared import check_prompts, role_prompts

_BOS: Final = "<|begin_of_text|>"


def read_prefixes(*sections: Section, declared: Declared) -> Mapping[Role, str]:
    """The prefix of each role, with the trailing space that the configuration leaves out.

    The first of the files that has one wins, then what the checkpoint declares, then the family's own.
    """
    prefixes = role_prompts(declared, {Role.NONE: "", Role.QUERY: "query: ", Role.PASSAGE: "passage: "})
    for role, key in ((Role.QUERY, "query_prefix"), (Role.PASSAGE, "passage_prefix")):
        if section := next((section for section in sections if section.has(key)), None):
            prefix = section.string(key)
            prefixes[role] = f"{prefix} " if prefix else ""
    check_prompts(declared, prefixes)
    return prefixes


def bos_of(tokenizer: PlainTokenizer) -> int:
    """The id of the token that ``tokenizer_config.json`` names as the first; raises ``CheckpointError``."""
    return tokenizer.id_of(token_name(tokenizer.path.parent, "bos_token", _BOS))
