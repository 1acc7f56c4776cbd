"""vLLM's conversations: one conversation is one input, and a conversation is one message.

More than one message is refused, as vLLM's template for this model does: a flat list of several messages
is more often a batch that lacks its inner lists than a dialogue, and a guess would give wrong vectors.
"""

from __future__ import annotations

from tessera.errors import InvalidInput
from tessera.frontend.api.content import read_parts
from tessera.frontend.api.request import Input
from tessera.frontend.api.values import Json, expected, reject_unknown
from tessera.frontend.shapes.roles import message_role
from tessera.frontend.shapes.scope import Scope


def is_message(value: Json) -> bool:
    return isinstance(value, dict) and ("role" in value or "content" in value)


def read_conversation(value: list[Json], param: str, scope: Scope) -> Input:
    if len(value) != 1:
        raise InvalidInput(
            f"{param}: expected a conversation of one message, found {len(value)}; "
            "a batch is a list of conversations, [[message], [message]]",
            param=param,
        )
    return read_message(value[0], f"{param}[0]", scope, owner=param)


def read_message(
    value: Json, param: str, scope: Scope, *, owner: str | None = None, bare: bool = False
) -> Input:
    """One message as one input, which is called ``owner`` in errors that concern it as a whole.

    ``bare`` allows an item without a role, as in Cohere's ``{"content": [...]}``.
    """
    if not isinstance(value, dict):
        raise expected(param, "a message, an object with role and content", value)
    reject_unknown(value, ("role", "content"), param)
    stated = None
    if not bare or "role" in value:
        stated = message_role(value.get("role"), f"{param}.role")
    content, path = value.get("content"), f"{param}.content"
    if isinstance(content, str):
        return scope.fused(scope.text(content, path), (), owner or param, stated=stated)
    if not isinstance(content, list):
        raise expected(path, "a string or a list of content parts", content)
    text, images = read_parts(content, path, scope)
    return scope.fused(text, images, owner or param, stated=stated)


def split_messages(value: Json, param: str) -> list[tuple[Json, str]]:
    """The conversations in a body's ``messages``: one when it lists messages, several when it lists lists."""
    if not isinstance(value, list) or not value:
        raise expected(param, "a non-empty list of messages or of conversations", value)
    if not isinstance(value[0], list):
        return [(value, param)]
    return [(conversation, f"{param}[{index}]") for index, conversation in enumerate(value)]
