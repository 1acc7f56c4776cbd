"""OpenAI's token form: ``[1, 2, 3]`` is one input of token ids, taken as it is."""

from __future__ import annotations

from tessera.frontend.api.request import Input
from tessera.frontend.api.values import INT32, Json, expected, integer
from tessera.frontend.shapes.scope import Scope
from tessera.models.base import Role


def read_tokens(value: list[Json], param: str, scope: Scope) -> Input:
    """Token ids get no prefix and no special tokens, so their role is always NONE.

    Ids beyond the vocabulary are found later, where the vocabulary is known.
    """
    tokens = []
    for index, token in enumerate(value):
        # ``type(...) is`` because a JSON ``true`` is an ``int`` to ``isinstance``.
        if type(token) is not int or not 0 <= token <= INT32:
            what = "a token id, an integer of at least 0"
            token = integer(token, f"{param}[{index}]", low=0, high=INT32, what=what)
        tokens.append(token)
    if len(tokens) > scope.limits.characters:
        raise expected(param, f"at most {scope.limits.characters} token ids", value)
    return Input(text=tuple(tokens), role=Role.NONE, param=param)
