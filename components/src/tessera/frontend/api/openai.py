"""``/v1/embeddings``: finds out which form each input has and hands it to that form's translation.

==============================================  ========================================
in ``input``                                    becomes
==============================================  ========================================
``"text"``                                      one input (``nim`` looks for data URLs)
``[1, 2, 3]``                                   one input of token ids
``[part, part]``, all objects with ``type``     one input
``[message]``, all objects with ``role``        one input
``{"text", "image"}``                           one input
any other list                                  one input per item, each in a form above
==============================================  ========================================

An item is a string, token ids, a list of parts, a list of one message, a message, an object with text or
image, or ``{"content": parts}``. A bare content part next to items of another kind is refused: it could
be an input of its own or belong to its neighbours. ``messages`` holds one conversation or a list of them.
"""

from __future__ import annotations

from collections.abc import Collection

import orjson

from tessera.errors import InvalidInput
from tessera.frontend.api.content import read_parts
from tessera.frontend.api.request import EmbeddingsRequest, Input, RequestLimits
from tessera.frontend.api.values import Json, clip, expected, request_body
from tessera.frontend.shapes.messages import is_message, read_conversation, read_message, split_messages
from tessera.frontend.shapes.nim import read_string
from tessera.frontend.shapes.objects import read_object
from tessera.frontend.shapes.openai import read_tokens
from tessera.frontend.shapes.options import FIELDS, INPUT_FIELDS, read_options
from tessera.frontend.shapes.roles import split_model
from tessera.frontend.shapes.scope import Modality, Scope, check_modality
from tessera.models.base import Role

Unit = tuple[Json, str]
"""The value that becomes one input, and its path."""


def read_json(raw: bytes, content_type: str = "") -> Json:
    """Parse a request body; raises ``InvalidInput`` for anything that is not one JSON value in UTF-8.

    ``content_type`` is the header's value. It is no reason to refuse anything, and a likely one for what
    cannot be parsed.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        kind = content_type.partition(";")[0].strip().lower()
        named = kind and not kind.endswith(("/json", "+json"))
        said = f", and its Content-Type is {clip(kind)}, not application/json" if named else ""
        raise InvalidInput(f"the body is not valid JSON{said}: {error}") from None


def parse_embeddings(
    body: Json, *, limits: RequestLimits | None = None, models: Collection[str] = ()
) -> EmbeddingsRequest:
    """Translate a parsed body. ``models`` are the served names, for NIM's ``-query``/``-passage`` suffix.

    Raises ``InvalidInput`` naming the path of the value at fault. Whether the model is served is not
    checked here.
    """
    limits = limits or RequestLimits()
    body = request_body(body, FIELDS)
    options = read_options(body)
    model, role = (None, None) if options.model is None else split_model(options.model, models)
    scope = Scope(role=options.role or role, limits=limits)
    units, name = _units(body)
    if len(units) > limits.inputs:
        raise InvalidInput(f"{name}: expected at most {limits.inputs} inputs, found {len(units)}", param=name)
    modalities = _spread(options.modality, len(units))
    inputs = tuple(
        _row(unit, scope, modality, conversations=name == "messages", partial=options.partial)
        for unit, modality in zip(units, modalities, strict=True)
    )
    return EmbeddingsRequest(
        inputs=inputs,
        model=model,
        encoding_format=options.encoding_format,
        dtype=options.dtype,
        dimensions=options.dimensions,
        dimensions_param=options.dimensions_param,
        normalize=options.normalize,
        truncate=options.truncate,
        max_tokens=options.max_tokens,
        partial=options.partial,
        user=options.user,
        priority=options.priority,
        request_id=options.request_id,
    )


def _units(body: dict[str, Json]) -> tuple[list[Unit], str]:
    """The values that become one input each, and the name of the field that holds them."""
    given = [name for name in INPUT_FIELDS if body.get(name) is not None]
    if len(given) != 1:
        found = "both" if given else "neither"
        raise InvalidInput(f"input: expected either input or messages, found {found}", param="input")
    (name,) = given
    value = body[name]
    if name == "messages":
        return [*split_messages(value, name)], name
    return (_split(value, name) if isinstance(value, list) else [(value, name)]), name


def _split(value: list[Json], param: str) -> list[Unit]:
    if not value:
        raise expected(param, "at least one input", value)
    if not isinstance(value[0], str | list | dict):
        return [(value, param)]
    parts = sum(_is_part(item) for item in value)
    if parts == len(value) or all(isinstance(item, dict) and "role" in item for item in value):
        return [(value, param)]
    if parts:
        stray = next(index for index, item in enumerate(value) if _is_part(item))
        raise InvalidInput(
            f"{param}[{stray}]: a content part beside inputs of another kind; "
            "put the parts of one input in a list of their own",
            param=f"{param}[{stray}]",
        )
    return [(item, f"{param}[{index}]") for index, item in enumerate(value)]


def _spread(modality: Modality | tuple[Modality, ...] | None, count: int) -> tuple[Modality | None, ...]:
    if not isinstance(modality, tuple):
        return (modality,) * count
    if len(modality) != count:
        raise InvalidInput(
            f"modality: expected one for each of the {count} inputs, found {len(modality)}", param="modality"
        )
    return modality


def _is_part(value: Json) -> bool:
    return isinstance(value, dict) and "type" in value and "role" not in value


def _row(unit: Unit, scope: Scope, modality: Modality | None, *, conversations: bool, partial: bool) -> Input:
    """One input; in a partial request one that cannot be read is a bad row, and not the end of the others."""
    value, param = unit
    try:
        if conversations and not (isinstance(value, list) and value):
            raise expected(param, "a conversation, a non-empty list of messages", value)
        return _read(value, param, scope, modality)
    except InvalidInput as error:
        if not partial:
            raise
        return Input(text="", role=Role.NONE, param=param, malformed=error)


def _read(value: Json, param: str, scope: Scope, modality: Modality | None) -> Input:
    if isinstance(value, str):
        return read_string(value, param, scope, modality)
    if isinstance(value, list):
        return check_modality(_read_list(value, param, scope), modality)
    if not isinstance(value, dict):
        raise expected(param, "text, token ids, content parts, a message or an object", value)
    if _is_part(value):
        raise expected(param, "the content parts of one input in a list", value)
    if is_message(value):
        return check_modality(read_message(value, param, scope, owner=param, bare=True), modality)
    return check_modality(read_object(value, param, scope), modality)


def _read_list(value: list[Json], param: str, scope: Scope) -> Input:
    if not value:
        raise expected(param, "token ids, content parts or a message", value)
    match value[0]:
        case dict() as first if is_message(first):
            return read_conversation(value, param, scope)
        case dict():
            return scope.fused(*read_parts(value, param, scope), param)
        case str() | list() | None:
            raise expected(f"{param}[0]", "a token id, a content part or a message", value[0])
        case _:
            return read_tokens(value, param, scope)
