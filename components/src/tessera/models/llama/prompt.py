"""How the prompts of these families begin: BOS, then the role's prefix. There is no end token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tessera.checkpoint.section import Section
from tessera.checkpoint.tokenizer import PlainTokenizer, token_name
from tessera.models.base import Content, Role
from tessera.models.prompts import Run, Segment, texts_of

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


def text_segments(bos: int, prefix: str, content: Content) -> list[Segment]:
    """The prompt of texts alone, joined as they are."""
    return [bos, Run(prefix, "".join(texts_of(content)))]
