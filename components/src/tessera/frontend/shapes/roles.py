"""Which role an input has, in one place.

The first line that applies decides:

==========================================  =========  ==============================================
what the request says                       role       why
==========================================  =========  ==============================================
message role ``query``                      QUERY      the most specific statement there is
message role ``document``, ``passage``      PASSAGE    likewise
``input_type`` (or ``task``) of the body    as named   NIM's and Cohere's way to say it
model name ending in ``-query``/-passage    as named   older NIM clients
input with an image                         PASSAGE    the checkpoint's own processor always does so
anything else                               NONE       raw text after BOS: vLLM's plain completion form
==========================================  =========  ==============================================

Message roles such as ``user`` say nothing about retrieval, so they fall through to the lines below.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from tessera.frontend.api.values import Json, expected
from tessera.models.base import Role

MESSAGE_ROLES: Final[dict[str, Role | None]] = {
    "query": Role.QUERY,
    "document": Role.PASSAGE,
    "passage": Role.PASSAGE,
    "user": None,
    "system": None,
    "developer": None,
    "assistant": None,
    "tool": None,
}
INPUT_TYPES: Final = {
    "query": Role.QUERY,
    "search_query": Role.QUERY,
    "passage": Role.PASSAGE,
    "document": Role.PASSAGE,
    "search_document": Role.PASSAGE,
}
TASKS: Final = {
    "query": Role.QUERY,
    "retrieval.query": Role.QUERY,
    "document": Role.PASSAGE,
    "retrieval.passage": Role.PASSAGE,
}
SUFFIXES: Final = {"-query": Role.QUERY, "-passage": Role.PASSAGE}


def message_role(value: Json, param: str) -> Role | None:
    if not isinstance(value, str) or value not in MESSAGE_ROLES:
        raise expected(param, f"one of {', '.join(MESSAGE_ROLES)}", value)
    return MESSAGE_ROLES[value]


def named_role(value: Json, param: str, known: dict[str, Role]) -> Role | None:
    """The role that ``input_type`` or ``task`` names; None when the value is null."""
    if value is None:
        return None
    if not isinstance(value, str) or value not in known:
        raise expected(param, f"one of {', '.join(known)}", value)
    return known[value]


def split_model(name: str, served: Collection[str]) -> tuple[str, Role | None]:
    """The model's name without a role suffix, and the role the suffix names.

    With ``served`` names given, a suffix is removed only where that makes a served name.
    """
    if name not in served:
        for suffix, role in SUFFIXES.items():
            base = name.removesuffix(suffix)
            if base and base != name and (not served or base in served):
                return base, role
    return name, None


def decide(stated: Role | None, requested: Role | None, *, images: bool) -> Role:
    """``stated`` comes from the message, ``requested`` from the body or the model's name."""
    if stated is not None:
        return stated
    if requested is not None:
        return requested
    return Role.PASSAGE if images else Role.NONE
