"""The fields of a ``/v1/embeddings`` body other than its inputs.

Where peers name one thing differently, every name is accepted and two that disagree are an error. Fields
that other servers know but that mean nothing here are accepted only with the value that changes nothing;
anything else would be ignored in silence, and the client would get vectors it did not ask for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tessera.errors import InvalidInput
from tessera.frontend.api.request import EmbedDtype, EncodingFormat
from tessera.frontend.api.values import (
    INT32,
    Json,
    JsonObject,
    boolean,
    choice,
    describe,
    expected,
    integer,
    optional_boolean,
    optional_string,
    positive,
    string,
)
from tessera.frontend.shapes.roles import INPUT_TYPES, TASKS, named_role
from tessera.frontend.shapes.scope import Modality
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
