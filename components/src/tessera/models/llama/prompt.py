"""How the prompts of these families begin: BOS, then the role's prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tessera.checkpoint.section import Section
from tessera.checkpoint.tokenizer import PlainTokenizer, token_name
from tessera.models.base import Role

_BOS: Final = "<|begin_of_text|>"


def read_prefixes(*sections: Section) -> Mapping[Role, str]:
    """The prefix of each role with its trailing space; the first of the files that has one wins."""
    prefixes = {Role.NONE: ""}
    for role, key, default in (
        (Role.QUERY, "query_prefix", "query:"),
        (Role.PASSAGE, "passage_prefix", "passage:"),
    ):
        for section in reversed(sections):
            default = section.string(key, default)
        prefixes[role] = f"{default} " if default else ""
    return prefixes


def bos_of(tokenizer: PlainTokenizer) -> int:
    """The id of the token that ``tokenizer_config.json`` names as the first; raises ``CheckpointError``."""
    return tokenizer.id_of(token_name(tokenizer.path.parent, "bos_token", _BOS))
