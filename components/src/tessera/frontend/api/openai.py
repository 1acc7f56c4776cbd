"""``/v1/embeddings``: every form of input, every option, and the OpenAPI description of the body.

Where peers name one thing differently, every name is accepted and two that disagree are an error. Fields
that other servers know but that mean nothing here are accepted only with the value that changes nothing;
anything else would be ignored in silence, and the client would get vectors it did not ask for.

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

The parser is stricter in what a schema cannot say, such as fields that contradict each other.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import orjson

from tessera.errors import InvalidInput
from tessera.frontend.api.content import (
    is_message,
    read_conversation,
    read_message,
    read_object,
    read_parts,
    read_string,
    read_tokens,
    split_messages,
)
from tessera.frontend.api.request import (
    INPUT_TYPES,
    TASKS,
    EmbeddingsRequest,
    EmbedDtype,
    EncodingFormat,
    Input,
    Modality,
    RequestLimits,
    Scope,
    check_modality,
    named_role,
    split_model,
)
from tessera.frontend.api.schema import (
    BOOLEAN,
    CONVERSATION,
    DTYPES,
    ITEM,
    STRING,
    WIDTH,
    Schema,
    list_of,
    nullable,
    values_of,
)
from tessera.frontend.api.values import (
    INT32,
    Json,
    JsonObject,
    boolean,
    choice,
    clip,
    describe,
    expected,
    integer,
    optional_boolean,
    optional_string,
    positive,
    request_body,
    string,
)
from tessera.models.base import Role, Truncate

INERT: Final[dict[str, tuple[Json, ...]]] = {
    "add_generation_prompt": (False,),
    "add_special_tokens": (True,),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "embed_override_token_id": (),
    "embed_overrides": (),
    "endianness": ("native", "little"),
    "late_chunking": (False,),
    "lora_path": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "padding": (False, "do_not_pad"),
    "return_multivector": (False,),
    "stream": (False,),
}
"""Fields of other servers, and the values besides null that change nothing. Vectors are little-endian on
every host, templates and preprocessing are the model's own, and nothing is ever padded."""

INERT_IN_CONVERSATIONS: Final = {"add_special_tokens": (False, True)}
"""A conversation's prompt already has its special tokens, so other servers default to False there."""

_DTYPE_ALIASES: Final = {"float": EmbedDtype.FLOAT32}
_NORMALIZE: Final = ("normalize", "use_activation", "normalized")
_DTYPE: Final = ("embed_dtype", "embedding_type", "output_dtype")
_DIMENSIONS: Final = ("dimensions", "output_dimension")
_TRUNCATE: Final = ("truncate", "truncation")
_REQUEST_ID: Final = ("request_id", "rid")
_VISIBLE: Final = re.compile(r"[\x21-\x7e]{1,128}")
_INT64 = 2**63 - 1

INPUT_FIELDS: Final = ("input", "messages")
FIELDS: Final = frozenset(
    (
        *INPUT_FIELDS,
        *("model", "input_type", "task", "modality", "encoding_format"),
        *("truncate_prompt_tokens", "truncation_side", "partial", "user", "priority"),
        *_NORMALIZE,
        *_DTYPE,
        *_DIMENSIONS,
        *_TRUNCATE,
        *_REQUEST_ID,
        *INERT,
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the body asks for beyond its inputs; ``modality`` is one for all inputs or one for each."""

    model: str | None
    role: Role | None
    modality: Modality | tuple[Modality, ...] | None
    encoding_format: EncodingFormat
    dtype: EmbedDtype
    dimensions: int | None
    dimensions_param: str
    normalize: bool
    truncate: Truncate
    max_tokens: int | None
    partial: bool
    user: str | None
    priority: int
    request_id: str | None


def read_options(body: JsonObject) -> Options:
    _reject_inert(body)
    truncate, max_tokens = _truncation(body)
    normalize, path = _one_of(body, _NORMALIZE)
    dtype, dtype_path = _one_of(body, _DTYPE)
    dimensions, dimensions_path = _one_of(body, _DIMENSIONS)
    encoding = body.get("encoding_format")
    priority = body.get("priority")
    return Options(
        model=optional_string(body, "model"),
        role=_role(body),
        modality=_modality(body.get("modality")),
        encoding_format=EncodingFormat.FLOAT
        if encoding is None
        else choice(encoding, "encoding_format", EncodingFormat),
        dtype=EmbedDtype.FLOAT32 if dtype is None else choice(dtype, dtype_path, EmbedDtype, _DTYPE_ALIASES),
        dimensions=None if dimensions is None else positive(dimensions, dimensions_path),
        dimensions_param=dimensions_path,
        normalize=True if normalize is None else boolean(normalize, path),
        truncate=truncate,
        max_tokens=max_tokens,
        partial=optional_boolean(body, "partial", default=False),
        user=optional_string(body, "user"),
        priority=0
        if priority is None
        else integer(priority, "priority", low=-_INT64 - 1, high=_INT64, what="a 64-bit integer"),
        request_id=_request_id(body),
    )


def _reject_inert(body: JsonObject) -> None:
    for name in INERT.keys() & body.keys():
        value, harmless = body[name], INERT[name]
        if "messages" in body:
            harmless = INERT_IN_CONVERSATIONS.get(name, harmless)
        # Comparing types as well: to ``==``, False is 0 and True is 1.
        if value is None or any(value == good and type(value) is type(good) for good in harmless):
            continue
        allowed = ", ".join(describe(good) for good in (None, *harmless))
        raise InvalidInput(
            f"{name}: not supported; accepted only as {allowed}, found {describe(value)}", param=name
        )


def _one_of(body: JsonObject, names: tuple[str, ...]) -> tuple[Json, str]:
    """The value that the body gives under any of the names, and the name; null counts as absent."""
    given = [(name, body[name]) for name in names if body.get(name) is not None]
    if not given:
        return None, names[0]
    name, value = given[0]
    for other, contradiction in given[1:]:
        if contradiction != value:
            raise InvalidInput(
                f"{other}: {describe(contradiction)} contradicts {name}: {describe(value)}", param=other
            )
    return value, name


def _role(body: JsonObject) -> Role | None:
    by_type = named_role(body.get("input_type"), "input_type", INPUT_TYPES)
    by_task = named_role(body.get("task"), "task", TASKS)
    if by_type is not None and by_task is not None and by_type is not by_task:
        raise InvalidInput("task: contradicts input_type", param="task")
    return by_type if by_type is not None else by_task


def _modality(value: Json) -> Modality | tuple[Modality, ...] | None:
    if value is None:
        return None
    if isinstance(value, list):
        return tuple(choice(item, f"modality[{index}]", Modality) for index, item in enumerate(value))
    return choice(value, "modality", Modality)


def _truncation(body: JsonObject) -> tuple[Truncate, int | None]:
    """NIM's ``truncate``, Voyage's ``truncation``, vLLM's ``truncate_prompt_tokens`` and ``truncation_side``.

    ``truncate_prompt_tokens`` alone drops the end; -1 stands for the model's own limit.
    """
    truncate, path = _one_of(body, _TRUNCATE)
    tokens, side = body.get("truncate_prompt_tokens"), body.get("truncation_side")
    chosen: Truncate | None = None
    if isinstance(truncate, bool):
        chosen = Truncate.END if truncate else Truncate.NONE
    elif truncate is not None:
        chosen = choice(truncate, path, Truncate)
    sided: Truncate | None = None
    if side is not None:
        sides = {"left": Truncate.START, "right": Truncate.END}
        known = sides.get(side) if isinstance(side, str) else None
        if known is None:
            raise expected("truncation_side", "one of left, right", side)
        sided = known
    if chosen is not None and sided is not None and chosen is not sided:
        raise InvalidInput(f"truncation_side: contradicts truncate: {chosen.value}", param="truncation_side")
    if tokens is None:
        return chosen or Truncate.NONE, None
    limit = integer(tokens, "truncate_prompt_tokens", low=-1, high=INT32, what="-1 or a positive integer")
    if limit == 0:
        raise expected("truncate_prompt_tokens", "-1 or a positive integer", tokens)
    if chosen is Truncate.NONE:
        raise InvalidInput(
            "truncate_prompt_tokens: contradicts truncate: NONE", param="truncate_prompt_tokens"
        )
    return chosen or sided or Truncate.END, None if limit == -1 else limit


def _request_id(body: JsonObject) -> str | None:
    value, name = _one_of(body, _REQUEST_ID)
    if value is None:
        return None
    # It is echoed in a response header and in logs, where a line break would forge another line.
    if not _VISIBLE.fullmatch(string(value, name)):
        raise expected(name, "1 to 128 visible ASCII characters", value)
    return string(value, name)


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


_ONE_OR_EACH: Final[Schema] = {"anyOf": [values_of(Modality), list_of(values_of(Modality))]}

_PROPERTIES: Final[dict[str, Schema]] = {
    "input": {"anyOf": [ITEM, list_of(ITEM)], "description": "What to embed; one vector per input."},
    "messages": {
        "anyOf": [CONVERSATION, list_of(CONVERSATION)],
        "description": "One conversation of one message, or a list of such; instead of input.",
    },
    "model": STRING,
    "input_type": {"type": "string", "enum": list(INPUT_TYPES)},
    "task": {"type": "string", "enum": list(TASKS)},
    "modality": _ONE_OR_EACH,
    "encoding_format": values_of(EncodingFormat),
    "embed_dtype": DTYPES,
    "embedding_type": DTYPES,
    "output_dtype": DTYPES,
    "dimensions": WIDTH,
    "output_dimension": WIDTH,
    "normalize": BOOLEAN,
    "normalized": BOOLEAN,
    "use_activation": BOOLEAN,
    "truncate": {"anyOf": [values_of(Truncate), BOOLEAN]},
    "truncation": {"anyOf": [values_of(Truncate), BOOLEAN]},
    "truncate_prompt_tokens": {
        "type": "integer",
        "minimum": -1,
        "maximum": 2**31 - 1,
        "not": {"enum": [0]},
        "description": "Most tokens of an input; -1 for the model's own limit.",
    },
    "truncation_side": {"type": "string", "enum": ["left", "right"]},
    "partial": {**BOOLEAN, "description": "Answer the good inputs when others fail."},
    "user": STRING,
    "priority": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "request_id": {"type": "string", "pattern": "^[!-~]{1,128}$"},
    "rid": {"type": "string", "pattern": "^[!-~]{1,128}$"},
}
_INERT: Final[dict[str, Schema]] = {
    name: {"enum": [*values, None], "description": "Accepted for compatibility; has no effect."}
    for name, values in INERT.items()
}


EMBEDDINGS_SCHEMA: Final[Schema] = {
    "type": "object",
    "title": "EmbeddingsRequest",
    "properties": {
        **{name: nullable(schema) for name, schema in _PROPERTIES.items()},
        **_INERT,
    },
    "additionalProperties": False,
}

assert EMBEDDINGS_SCHEMA["properties"].keys() == FIELDS, "the schema and the parser know different fields"
