"""OpenAI's API: ``/v1/embeddings`` with every form of input, and ``/v1/models``.

Where other servers (vLLM, NIM, SGLang, Jina) name one thing differently, every name is accepted, and two that
disagree are an error. Their fields that mean nothing here are accepted only with a value that changes
nothing: anything else would be ignored in silence, and the client would get vectors it did not ask for.

==============================================  ========================================
in ``input``                                    becomes
==============================================  ========================================
``"text"``                                      one input (``content.py`` looks for data URLs)
``[1, 2, 3]``                                   one input of token ids
``[part, part]``, all objects with ``type``     one input
``[message]``, all objects with ``role``        one input
``{"text", "image"}``                           one input
any other list                                  one input per item, each in a form above
==============================================  ========================================

An item is a string, token ids, a list of parts, a list of one message, a message, an object with text or
image, or ``{"content": parts}``. A bare content part next to items of another kind is refused: it could
be an input of its own or belong to its neighbours. ``messages`` holds one conversation or a list of them.

The parser also refuses what the schema cannot express, such as fields that contradict each other.
"""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import repeat
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tessera.errors import InvalidInput
from tessera.frontend.api.body import (
    FLAG,
    Also,
    Flag,
    Form,
    Instruction,
    Kind,
    ModelName,
    Text,
    about,
    named,
    several,
    unread,
    whole,
)
from tessera.frontend.api.content import (
    InputBuilder,
    check_modality,
    is_message,
    read_conversation,
    read_message,
    read_object,
    read_parts,
    read_string,
    read_tokens,
    split_messages,
)
from tessera.frontend.api.documents import check_chunks, document_of
from tessera.frontend.api.endpoint import SPARSE, TOKEN_VECTORS, VECTORS, Translated
from tessera.frontend.api.formats import (
    ResponseBody,
    Values,
    Vectors,
    base64_rows,
    base64_text,
    convert,
    finish,
    json_content,
    json_list,
    json_matrix,
    matrices,
    numbers,
)
from tessera.frontend.api.routes import ApiRoute, get_route
from tessera.frontend.api.schema import (
    BOOLEAN,
    CONVERSATION,
    DESCRIBED,
    ERROR_OBJECT,
    ITEM,
    NUMBERS,
    TEXT,
    WHOLE,
    Schema,
    answer_of,
    list_of,
    object_of,
)
from tessera.frontend.api.values import (
    INT32,
    Json,
    JsonObject,
    NoText,
    expected,
    filled_string,
    integer,
    is_list,
    json_object,
    string,
)
from tessera.frontend.http.errors import error_object
from tessera.frontend.request import (
    EmbeddingsRequest,
    EmbedDtype,
    EncodingFormat,
    Input,
    Modality,
    RequestLimits,
    split_model,
)
from tessera.frontend.service import ClientApi, Service, described
from tessera.frontend.serving.pipeline import Result, Usage
from tessera.frontend.serving.served import Served, ServedModel
from tessera.models.base import CHUNKS, TRUNCATIONS, Output, OutputKind, Role, Truncate
from tessera.models.declared import NAMED_ROLES
from tessera.rows import Rows

INERT: Final[dict[str, tuple[Json, ...]]] = {
    "add_generation_prompt": (False,),
    "add_special_tokens": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "embed_override_token_id": (),
    "embed_overrides": (),
    "late_chunking_params": (),
    "lora_path": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "padding": (False, "do_not_pad"),
    "stream": (False,),
}
"""Fields of other servers, and the values besides null that change nothing. Templates and preprocessing are
the model's own, and nothing is ever padded."""

_INERT_IN_CONVERSATIONS: Final = INERT | dict.fromkeys(
    ("add_special_tokens", "add_generation_prompt", "continue_final_message"), (False, True)
)
"""Likewise where the body has ``messages``: these three say how a chat template ends, and a conversation's
prompt ends as the model was trained to have it."""

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

_SALT_CHARACTERS: Final = 256
_VISIBLE: Final = re.compile(r"[\x21-\x7e]{1,128}")
# Of most bodies: their other fields are not looked for, which takes 3.5 of 13 µs.
_PLAIN: Final = frozenset(("input", "model"))

_Modality = Modality | tuple[Modality, ...] | None
"""For all inputs, or for each."""


def _request_id(value: Json, path: str) -> str:
    # It is echoed in a response header and in logs, where a line break would forge another line.
    if not _VISIBLE.fullmatch(text := string(value, path)):
        raise expected(path, "1 to 128 visible ASCII characters", value)
    return text


def _cache_salt(value: Json, path: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= _SALT_CHARACTERS:
        raise expected(path, f"a text of 1 to {_SALT_CHARACTERS} characters", value)
    return value


def _truncate(value: Json, path: str) -> Truncate:
    if isinstance(value, bool):
        return Truncate.DECLARED if value else Truncate.NONE
    read: Truncate = _TRUNCATE.read(value, path)
    return read


def _most_tokens(value: Json, path: str) -> int:
    limit = integer(value, path, low=-1, high=INT32, what="-1 or a positive integer")
    if limit == 0:
        raise expected(path, "-1 or a positive integer", value)
    return limit


def _and_name(kind: Kind) -> Kind:
    """Read a value with the name that the client has for it, which errors that come later say."""
    return Kind(
        lambda value, path: (kind.read(value, path), path),
        kind.schema,
        lambda default: None if default[0] is None else kind.write(default[0]),
    )


_TRUNCATE: Final = named(TRUNCATIONS)
_MODALITY: Final = named(Modality)
_SIDES: Final = {"left": Truncate.START, "right": Truncate.END}
# Native is little, as on every machine that runs this.
_ENDIANNESS: Final = {"native": False, "little": False, "big": True}
_LIMIT: Final[Schema] = {"type": "integer", "minimum": -1, "maximum": INT32, "not": {"enum": [0]}}
_SALT: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": _SALT_CHARACTERS}
_ID: Final[Schema] = {"type": "string", "pattern": "^[!-~]{1,128}$"}
# Infinity's clients send 0 for the whole.
_WIDTH: Final = whole("a width, or 0 for the whole", 0)

TruncateOption = Annotated[
    Truncate | None,
    Kind(_truncate, {"anyOf": [_TRUNCATE.schema, BOOLEAN]}),
    about(
        "What becomes of a text that is too long: NONE is an error, START and END drop that side. true is "
        "END, false is NONE.",
        "END",
    ),
]
MostTokens = Annotated[
    int | None,
    Kind(_most_tokens, _LIMIT),
    about("The most tokens of an input, beyond which it is cut; -1 for the model's own limit.", 512),
]
_RequestId = Annotated[
    str | None,
    Kind(_request_id, _ID),
    about("An id of the client's for the request, which the answer and the logs have.", "search-2041"),
]


class Options(msgspec.Struct, kw_only=True):
    """Declares what requests for vectors and requests for scores have in common."""

    model: ModelName = None
    instruction: Instruction = None
    truncate: TruncateOption = None
    truncate_prompt_tokens: MostTokens = None
    truncation_side: Annotated[
        Truncate | None, named(_SIDES), about("The side that is dropped of a text that is too long.")
    ] = None
    user: Annotated[Text, about("The client's name for its user. It is accepted and not kept.", "u-17")] = (
        None
    )
    priority: Annotated[
        int,
        whole("a 64-bit integer", -(2**63), 2**63 - 1),
        about("Requests with lower numbers are answered first.", 10),
    ] = 0
    request_id: _RequestId = None
    cache_salt: Annotated[
        str | None,
        Kind(_cache_salt, _SALT),
        about("Requests with another salt, or none, share nothing that is cached with this one.", "tenant-7"),
    ] = None

    def truncation(self, unasked: Truncate = Truncate.NONE) -> tuple[Truncate, int | None]:
        """Return what becomes of a text that is too long, and the most tokens that it may have.

        ``truncate_prompt_tokens`` alone drops the side that is declared; -1 stands for the model's own limit.
        Where neither it nor ``truncate`` is given, the answer is ``unasked``, on the side that is given.
        """
        chosen, side, limit = self.truncate, self.truncation_side, self.truncate_prompt_tokens
        if chosen is Truncate.DECLARED:
            chosen = side or chosen
        if chosen is not None and side is not None and chosen is not side:
            raise InvalidInput.at("truncation_side", f"contradicts truncate: {chosen.value}")
        if limit is None:
            return chosen or (unasked if unasked is Truncate.NONE else side or unasked), None
        if chosen is Truncate.NONE:
            raise InvalidInput.at("truncate_prompt_tokens", "contradicts truncate: NONE")
        return chosen or side or Truncate.DECLARED, None if limit == -1 else limit


class EmbeddingsBody(Options, kw_only=True):
    """Declares the body of ``/v1/embeddings``."""

    input: Annotated[
        Json,
        unread({"anyOf": [ITEM, list_of(ITEM)]}),
        about(
            "What to embed: a text, a list of texts, tokens, or parts with images; one vector per input.",
            "a yellow heart",
            [
                "a yellow heart",
                [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}],
            ],
        ),
    ] = None
    messages: Annotated[
        Json,
        unread({"anyOf": [CONVERSATION, list_of(CONVERSATION)]}),
        about(
            "One conversation, or a list of them, in place of `input`.",
            [{"role": "user", "content": "a yellow heart"}],
        ),
    ] = None
    input_type: Annotated[
        Role | None,
        named(INPUT_TYPES),
        about("Whether the inputs are queries or passages to be found: models have a prompt for each."),
    ] = None
    task: Annotated[Role | None, named(TASKS), about("The same by Jina's names.")] = None
    prompt_name: Annotated[
        Text, about("The prompt before the inputs, by the name that the checkpoint has for it.", "query")
    ] = None
    modality: Annotated[
        Json,
        unread({"anyOf": [_MODALITY.schema, list_of(_MODALITY.schema)]}),
        about("What the inputs are to hold, for all or for each; others are refused.", "text"),
    ] = None
    encoding_format: Annotated[
        EncodingFormat,
        named(EncodingFormat),
        about("How vectors are written: as JSON numbers, in base64, or as bytes behind or without JSON."),
    ] = EncodingFormat.FLOAT
    endianness: Annotated[
        bool, named(_ENDIANNESS), about("The order of bytes in base64 and bytes; native is little.")
    ] = False
    return_multivector: Annotated[
        Flag, about("Whether each input has the vectors of its tokens, under `embeddings` as Jina has it.")
    ] = False
    embed_dtype: Annotated[
        tuple[EmbedDtype, str],
        _and_name(named(EmbedDtype, float=EmbedDtype.FLOAT32)),
        Also("embedding_type", "output_dtype"),
        about("The type of a vector's values. int8 and uint8 are scaled; binary types hold a bit for each."),
    ] = (EmbedDtype.FLOAT32, "embed_dtype")
    dimensions: Annotated[
        tuple[int | None, str],
        _and_name(_WIDTH),
        Also("output_dimension"),
        about("The number of values of a vector, one of those that the model offers; 0 for all.", 256),
    ] = (None, "dimensions")
    normalize: Annotated[
        Flag, Also("use_activation", "normalized"), about("Whether vectors have length 1.")
    ] = True
    truncate: Annotated[TruncateOption, Also("truncation")] = None
    truncate_prompt_tokens: Annotated[
        MostTokens, Meta(description="The most tokens of an input; -1 for the model's own limit.")
    ] = None
    partial: Annotated[Flag, about("Whether good inputs are answered where others fail.")] = False
    request_id: Annotated[_RequestId, Also("rid")] = None

    def role(self) -> Role | None:
        """Return the role that the body asks for."""
        by_type, by_task = self.input_type, self.task
        if by_type is not None and by_task is not None and by_type is not by_task:
            raise InvalidInput.at("task", "contradicts input_type")
        role = by_type if by_type is not None else by_task
        if None not in (role, self.prompt_name) and NAMED_ROLES.get(self.prompt_name or "") is not role:
            raise InvalidInput.at("prompt_name", "contradicts input_type")
        return role


def _options(body: EmbeddingsBody) -> dict[str, Any]:
    """Return the fields of ``EmbeddingsRequest`` beside the inputs and the model."""
    truncate, max_tokens = body.truncation()
    (dtype, dtype_param), (width, dimensions_param) = body.embed_dtype, body.dimensions
    if body.partial and body.encoding_format is EncodingFormat.BYTES_ONLY:
        raise InvalidInput.at("partial", "a body of bytes_only has no place for errors")
    return {
        "encoding_format": body.encoding_format,
        "dtype": dtype,
        "dtype_param": dtype_param,
        "dimensions": width or None,
        "dimensions_param": dimensions_param,
        "normalize": body.normalize,
        "multivector": body.return_multivector,
        "big_endian": body.endianness,
        "truncate": truncate,
        "max_tokens": max_tokens,
        "allow_partial": body.partial,
        "priority": body.priority,
        "request_id": body.request_id,
        "cache_salt": body.cache_salt or "",
    }


def _modality(value: Json, most: int) -> _Modality:
    if is_list(value):
        _check_count(value, "modality", most)
        return tuple([_MODALITY.read(item, f"modality[{index}]") for index, item in enumerate(value)])
    read: Modality | None = None if value is None else _MODALITY.read(value, "modality")
    return read


_OUTPUT_TYPES: Final = {
    "dense": "dense",
    "sparse": "sparse",
    "multivector": "multivector",
    "multi_vector": "multivector",
}


class NamedOutputsBody(EmbeddingsBody, kw_only=True):
    """Declares what ``/v1/embeddings`` has beside: outputs by name, and chunks of a document."""

    output_types: Annotated[
        tuple[str, ...],
        several(named(_OUTPUT_TYPES), len(_OUTPUT_TYPES)),
        about(
            "Which of the model's outputs each input is answered with, all of one pass: a dense vector, "
            "sparse weights of token ids, or a vector of each token. `GET /v1/models` lists them.",
            ["dense", "sparse"],
        ),
    ] = ()
    return_dense: Annotated[bool | None, FLAG, about("Whether the dense vector is among them.")] = None
    return_sparse: Annotated[bool | None, FLAG, about("Whether sparse weights are among them.")] = None
    return_colbert_vecs: Annotated[bool | None, FLAG, about("Whether token vectors are among them.")] = None
    return_tokens: Annotated[
        Flag, about("Whether sparse weights have the texts of their tokens beside the ids.")
    ] = False
    max_active_dims: Annotated[
        int | None,
        whole("a positive number of weights", 1),
        about("The most weights of a sparse output, the largest ones.", 128),
    ] = None
    late_chunking: Annotated[
        Flag,
        about(
            "Whether the inputs are the chunks of one document: each gets a vector of its own tokens, behind "
            "one pass over all of them. `GET /v1/models` says which models can."
        ),
    ] = False

    def names(self) -> tuple[str, ...]:
        """Return the outputs that are asked for, each once; none where the body names none."""
        flags = {
            "dense": self.return_dense,
            "sparse": self.return_sparse,
            "multivector": self.return_colbert_vecs,
        }
        if set(flags.values()) == {None}:
            return tuple(dict.fromkeys(self.output_types))
        # As in FlagEmbedding, a dense vector is there unless it is declined.
        by_flag = [name for name, flag in flags.items() if flag or (flag is None and name == "dense")]
        if self.output_types and set(self.output_types) != set(by_flag):
            raise InvalidInput.at("output_types", "contradicts return_dense and its kin")
        if not by_flag:
            raise InvalidInput.at("return_dense", "nothing is asked for")
        return self.output_types or tuple(by_flag)


E = TypeVar("E", bound=EmbeddingsBody)

EMBEDDINGS: Final = Form(NamedOutputsBody, inert=INERT, title="EmbeddingsRequest")

Unit = tuple[Json, str]
"""The value that becomes one input, and its path."""

_Reader = Callable[[Json, str, InputBuilder, Modality | None], Input]


def parse_embeddings(
    value: Json, *, limits: RequestLimits | None = None, models: Collection[str] = ()
) -> EmbeddingsRequest:
    """Translate a parsed body. ``models`` are the served names, for NIM's ``-query``/``-passage`` suffix.

    Raises ``InvalidInput`` naming the path of the value at fault. Whether the model is served is not
    checked here.
    """
    limits, given = limits or RequestLimits(), json_object(value)
    if not given.keys() <= _PLAIN:
        body = read_body(EMBEDDINGS, given)
        return _with_outputs(translate(body, limits, models), body, limits)
    model = given.get("model")
    model = None if model is None else filled_string(model, "model")
    return translate(EmbeddingsBody(input=given.get("input"), model=model), limits, models, plain=True)


def _with_outputs(
    request: EmbeddingsRequest, body: NamedOutputsBody, limits: RequestLimits
) -> EmbeddingsRequest:
    """Return a request with the outputs that its body asks for."""
    if body.late_chunking:
        return _of_document(request, body, limits)
    names, most, tokens = body.names(), body.max_active_dims, body.return_tokens
    if not (names or most or tokens):
        return request
    return msgspec.structs.replace(request, outputs=names, most_active=most, tokens=tokens)


def _of_document(
    request: EmbeddingsRequest, body: NamedOutputsBody, limits: RequestLimits
) -> EmbeddingsRequest:
    """Make the inputs of a request the chunks of one document."""
    for name, given in (
        ("messages", body.messages is not None),
        ("partial", body.partial),
        ("return_multivector", body.return_multivector),
        ("output_types", bool(body.names())),
    ):
        if given:
            raise InvalidInput.at("late_chunking", f"contradicts {name}")
    return msgspec.structs.replace(
        request, inputs=(document_of(request.inputs, "input", limits),), outputs=(CHUNKS,)
    )


def read_body(form: Form[E], value: Json) -> E:
    """Read a body whose ``messages``, where it has them, decide what is without effect."""
    messages = isinstance(value, dict) and "messages" in value
    return form.read(value, _INERT_IN_CONVERSATIONS if messages else None)


def translate(
    body: EmbeddingsBody, limits: RequestLimits, models: Collection[str], *, plain: bool = False
) -> EmbeddingsRequest:
    """Translate a body; a ``plain`` one has no other fields than its inputs and the model."""
    model, options = body.model, dict[str, Any]()
    role: Role | None = None
    modality: _Modality = None
    if not plain:
        options, role, modality = _options(body), body.role(), _modality(body.modality, limits.inputs)
    if model is not None and model not in models:
        model, by_name = split_model(model, models)
        role = role or by_name
    builder = InputBuilder.of(body.instruction, role, limits)
    if body.prompt_name is not None:
        builder = builder.named(body.prompt_name)
    units = _units(body.input, body.messages, limits.inputs)
    modalities = _spread(modality, len(units)) if isinstance(modality, tuple) else repeat(modality)
    read = _read if body.messages is None else _read_messages
    if body.partial:
        read = partial(_read_or_fail, read)
    inputs = tuple(
        read(value, param, builder, kind) for (value, param), kind in zip(units, modalities, strict=False)
    )
    return EmbeddingsRequest(inputs=inputs, model=model, **options)


def _check_count(value: Sequence[Json], name: str, most: int) -> None:
    """Raise for more than ``most`` items, before anything looks at each: 5 million took 5 s of the loop."""
    if len(value) > most:
        raise InvalidInput.at(name, f"expected at most {most} inputs, found {len(value)}")


def _units(value: Json, messages: Json, most: int) -> list[Unit]:
    """List the values that become one input each."""
    if (value is None) is (messages is None):
        given = "neither" if value is None else "both"
        raise InvalidInput.at("input", f"expected either input or messages, found {given}")
    if messages is not None:
        if isinstance(messages, list) and messages and isinstance(messages[0], list):
            _check_count(messages, "messages", most)
        return split_messages(messages)
    return _split(value, "input", most) if is_list(value) else [(value, "input")]


def _split(value: Sequence[Json], param: str, most: int) -> list[Unit]:
    if not value:
        raise expected(param, "at least one input", value)
    first = value[0]
    if not (is_list(first) or isinstance(first, str | dict | NoText)):
        return [(value, param)]
    objects = isinstance(first, dict)
    if objects and all(map(_is_part, value)):
        return [(value, param)]
    _check_count(value, param, most)
    if objects and all(isinstance(item, dict) and "role" in item for item in value):
        return [(value, param)]
    if any(map(_is_part, value)):
        raise _stray_part(value, param)
    return [(item, f"{param}[{index}]") for index, item in enumerate(value)]


def _stray_part(value: Sequence[Json], param: str) -> InvalidInput:
    stray = next(index for index, item in enumerate(value) if _is_part(item))
    return InvalidInput.at(
        f"{param}[{stray}]",
        "a content part beside inputs of another kind; put the parts of one input in a list of their own",
    )


def _spread(modality: tuple[Modality, ...], count: int) -> tuple[Modality, ...]:
    if len(modality) == 1:
        return modality * count
    if len(modality) != count:
        raise InvalidInput.at(
            "modality", f"expected one for each of the {count} inputs, found {len(modality)}"
        )
    return modality


def _is_part(value: Json) -> bool:
    return isinstance(value, dict) and "type" in value and "role" not in value


def _read_or_fail(
    read: _Reader, value: Json, param: str, builder: InputBuilder, modality: Modality | None
) -> Input:
    """Read an input that fails alone, and not the others with it, where it cannot be read."""
    try:
        return read(value, param, builder, modality)
    except InvalidInput as error:
        return Input(parts=(), role=Role.NONE, param=param, malformed=error.kept())


def _read_messages(value: Json, param: str, builder: InputBuilder, modality: Modality | None) -> Input:
    if not (is_list(value) and value):
        raise expected(param, "a conversation, a non-empty list of messages", value)
    return _read(value, param, builder, modality)


def _read(value: Json, param: str, builder: InputBuilder, modality: Modality | None) -> Input:
    if isinstance(value, str):
        entry = read_string(value, param, builder, modality)
    elif is_list(value):
        entry = _read_list(value, param, builder)
    elif not isinstance(value, dict):
        raise expected(param, "text, token ids, content parts, a message or an object", value)
    elif _is_part(value):
        raise expected(param, "the content parts of one input in a list", value)
    elif is_message(value):
        entry = read_message(value, param, builder, owner=param, bare=True)
    else:
        entry = read_object(value, param, builder)
    return entry if modality is None else check_modality(entry, modality)


def _read_list(value: Sequence[Json], param: str, builder: InputBuilder) -> Input:
    if not value:
        raise expected(param, "token ids, content parts or a message", value)
    match value[0]:
        case dict() as first if is_message(first):
            return read_conversation(value, param, builder)
        case dict():
            return builder.build(read_parts(value, param, builder), param)
        case str() | list() | array() | None:
            raise expected(f"{param}[0]", "a token id, a content part or a message", value[0])
        case _:
            return read_tokens(value, param, builder)


MATRIX: Final[Schema] = {"type": "array", "items": NUMBERS}
SHAPE: Final[Schema] = {"type": "array", "items": WHOLE}
_EMBEDDING: Final[Schema] = {"anyOf": [NUMBERS, MATRIX, TEXT, {"type": "null"}]}
_SPARSE: Final[Schema] = object_of(
    optional=("tokens",), indices=list_of(WHOLE), values=NUMBERS, tokens=list_of(TEXT)
)
_ROW: Final[dict[str, Any]] = object_of(
    optional=("embedding", "embeddings", "shape", "error", "sparse_embedding", "multi_vector"),
    object={"const": "embedding"},
    index=WHOLE,
    embedding=_EMBEDDING,
    embeddings=_EMBEDDING,
    sparse_embedding=_SPARSE,
    multi_vector={"anyOf": [MATRIX, TEXT]},
    shape=SHAPE,
    error=ERROR_OBJECT,
)
USAGE: Final = object_of(
    prompt_tokens=WHOLE,
    total_tokens=WHOLE,
    prompt_tokens_details=object_of(
        text_tokens=WHOLE,
        image_tokens=WHOLE,
        cached_tokens=WHOLE,
    ),
)
_ANSWER: Final = answer_of("list", data=list_of(_ROW), usage=USAGE)
_MODEL: Final = object_of(
    id=TEXT,
    object={"const": "model"},
    created=WHOLE,
    owned_by=TEXT,
    max_model_len=WHOLE,
    **DESCRIBED,
)
_MODELS: Final = object_of(object={"const": "list"}, data=list_of(_MODEL))


def finished(rows: Vectors, request: EmbeddingsRequest, output: Output) -> Values:
    """Output rows as the request wants them: their width, length, element type and order of bytes."""
    normalize = request.normalize and (output.kind is OutputKind.VECTOR or output.unit_length)
    vectors = finish(rows, width=request.dimensions or rows.shape[1], normalize=normalize)
    if request.dtype is EmbedDtype.FLOAT32 and not request.big_endian:
        return vectors
    values = convert(vectors, request.dtype, request.dtype_param)
    if request.encoding_format is EncodingFormat.FLOAT:
        return numbers(values, request.dtype)
    return values.byteswap() if request.big_endian else values


def write_embeddings(request: EmbeddingsRequest, served: Served, result: Result) -> ResponseBody:
    """OpenAI's list of embeddings in the encoding the request asks for.

    Where the output is a vector for each token an embedding is a matrix; in base64 its ``shape`` stands
    beside it. Rows of failed inputs are ignored: in JSON their ``embedding`` is null and an ``error`` stands
    beside it; in a ``bytes`` body they are listed under ``errors`` in the metadata, and zeros where the
    output is one vector.
    """
    head = {"id": f"embd-{result.request_id}", "object": "list", "created": int(time.time())}
    head["model"] = served.model
    if request.encoding_format in (EncodingFormat.BYTES, EncodingFormat.BYTES_ONLY):
        return _raw_body(request, served, head, result)
    if request.outputs or served.output.kind is OutputKind.SPARSE:
        data = _named_outputs(request, served, result)
        width = sum([rows.values.size for rows in result.outputs.values()]) // max(1, len(data))
    else:
        values = finished(result.rows.values, request, served.output)
        bounds = result.rows.bounds if served.output.kind is OutputKind.TOKENS else None
        key, width = "embeddings" if request.multivector else "embedding", values.shape[1]
        entries = row_entries(values, bounds, request, key)
        data = [{"object": "embedding", "index": index, **entry} for index, entry in enumerate(entries)]
        put_errors(data, result, key)
    content = json_content({**head, "data": json_list(data, width), "usage": usage_object(result.usage)})
    return ResponseBody(content=content, media_type="application/json", headers={})


def _named_outputs(request: EmbeddingsRequest, served: Served, result: Result) -> list[dict[str, Any]]:
    """Write the outputs of each input that were named, each under a key of its own.

    ``embedding`` is always there, of the type that clients expect: without a dense vector it is empty.
    """
    encoded = request.encoding_format is EncodingFormat.BASE64
    entries: list[dict[str, Any]] = [
        {"object": "embedding", "index": index, "embedding": "" if encoded else []}
        for index in range(len(request.inputs))
    ]
    for output in served.asked(request.outputs):
        rows = result.outputs[output.name]
        if output.kind is OutputKind.SPARSE:
            found: list[dict[str, Any]] = [
                {"sparse_embedding": sparse_object(part, request, served)} for part in rows
            ]
        elif output.kind is OutputKind.TOKENS:
            found = row_entries(
                finished(rows.values, msgspec.structs.replace(request, dimensions=None), output),
                rows.bounds,
                request,
                "multi_vector",
            )
        else:
            found = row_entries(finished(rows.values, request, output), None, request, "embedding")
        for entry, own in zip(entries, found, strict=True):
            entry |= own
    for index in result.errors:
        entries[index] = {"object": "embedding", "index": index}
    put_errors(entries, result, "embedding")
    return entries


def sparse_object(rows: Rows, request: EmbeddingsRequest, served: Served) -> dict[str, Any]:
    """Write the weights of one input, ascending by token id; the largest ones where they are bounded."""
    weights, ids = sparse_weights(rows, request.most_active)
    written: dict[str, Any] = {"indices": ids, "values": weights}
    if request.tokens:
        written["tokens"] = [served.token_text(token) for token in ids.tolist()]
    return written


def sparse_weights(rows: Rows, most: int | None = None) -> tuple[Values, Values]:
    """Return weights float32 ``[n]`` and token ids int32 ``[n]`` of one input, the ``most`` largest."""
    if rows.indices is None:
        # Of a request whose inputs have all failed.
        return np.empty(0, np.float32), np.empty(0, np.int32)
    weights, ids = np.ascontiguousarray(rows.values[:, 0]), np.ascontiguousarray(rows.indices)
    if most is not None and len(weights) > most:
        # Of equal weights the smaller ids.
        kept = np.sort(np.argsort(-weights, kind="stable")[:most])
        weights, ids = weights[kept], ids[kept]
    return weights, ids


def row_entries(
    values: Values, bounds: npt.NDArray[np.int64] | None, request: EmbeddingsRequest, key: str
) -> list[dict[str, Any]]:
    """Write the row of each input under ``key``, or its matrix where there are ``bounds``.

    As JSON or in base64, where the shape of a matrix stands beside it.
    """
    encoded = request.encoding_format is EncodingFormat.BASE64
    if bounds is None:
        return [{key: row} for row in (base64_rows(values) if encoded else values)]
    if encoded:
        return [{key: base64_text(part), "shape": list(part.shape)} for part in matrices(values, bounds)]
    return [{key: json_matrix(part)} for part in matrices(values, bounds)]


def put_errors(data: Sequence[dict[str, Any]], result: Result, key: str) -> None:
    """Write the error of each failed input in place of its row."""
    for index, error in result.errors.items():
        data[index].pop("shape", None)
        data[index] |= {key: None, "error": error_object(error)}


def bytes_body(values: Values, metadata: dict[str, Any], result: Result) -> ResponseBody:
    """Write values as they lie in memory; failed inputs stand in the metadata."""
    if result.errors:
        codes = {str(index): error_object(error)["code"] for index, error in result.errors.items()}
        metadata = {**metadata, "errors": codes}
    return ResponseBody.of_bytes(values, metadata)


def _raw_body(
    request: EmbeddingsRequest, served: Served, head: dict[str, Any], result: Result
) -> ResponseBody:
    """The rows one after another, and a ``metadata`` header that says how to read them.

    All rows have one shape, so the header gives it once instead of once for each row: a header that
    grows with the batch runs into the limits of clients and proxies. Of token vectors it also says which
    are an input's.
    """
    (output,) = served.asked(request.outputs)
    bounds = result.rows.bounds if output.kind is OutputKind.TOKENS else None
    values = finished(result.rows.values, request, output)
    failures = result.errors
    if failures and bounds is None:
        values = values.copy()  # it may be the engine's own, read-only
        values[list(failures)] = 0
    if request.encoding_format is EncodingFormat.BYTES_ONLY:
        return ResponseBody.of_bytes(values)
    metadata = {
        **head,
        "embed_dtype": request.dtype.value,
        "endianness": "big" if request.big_endian else "little",
        "shape": list(values.shape),
        "usage": usage_object(result.usage),
    }
    if bounds is not None:
        metadata["bounds"] = bounds.tolist()
    return bytes_body(values, metadata, result)


def usage_object(usage: Usage) -> dict[str, Any]:
    total = usage.total_tokens
    details = {
        "text_tokens": usage.text_tokens,
        "image_tokens": usage.image_tokens,
        "cached_tokens": usage.cached_tokens,
    }
    return {"prompt_tokens": total, "total_tokens": total, "prompt_tokens_details": details}


def _translate(body: Json, served: Served) -> Translated:
    request = parse_embeddings(body, limits=served.limits, models=served.names)
    if request.outputs or request.multivector or served.output.kind is OutputKind.SPARSE:
        return _translate_other(request, served)
    return Translated(request=request, write=partial(write_embeddings, request, served))


def _translate_other(request: EmbeddingsRequest, served: Served) -> Translated:
    """Check a request for other rows than a vector of each input."""
    if request.outputs == (CHUNKS,):
        check_chunks(served, "late_chunking")
        # Each chunk's vector is written as that of an input.
        write = partial(write_embeddings, msgspec.structs.replace(request, outputs=()), served)
        return Translated(request=request, write=write)
    if request.outputs or served.output.kind is OutputKind.SPARSE:
        request = _named(request, served)
    if request.multivector and served.output.kind is not OutputKind.TOKENS:
        raise InvalidInput.at(
            "return_multivector", f"{served.model!r} gives one vector for each input, and none for its tokens"
        )
    return Translated(request=request, write=partial(write_embeddings, request, served))


def _named(request: EmbeddingsRequest, served: Served) -> EmbeddingsRequest:
    """Check what is asked for by name, or weights that are the default; the default alone needs no name.

    But that of token vectors, which has another key when it is named.
    """
    outputs = served.asked(request.outputs)
    if all(output.kind is OutputKind.SPARSE for output in outputs):
        _check_weights(request)
    raw = request.encoding_format in (EncodingFormat.BYTES, EncodingFormat.BYTES_ONLY)
    if raw and (len(outputs) > 1 or outputs[0].kind is OutputKind.SPARSE):
        raise InvalidInput.at(
            "encoding_format", "bytes hold vectors of one output alone; ask for base64 or float"
        )
    if request.multivector:
        raise InvalidInput.at("return_multivector", "contradicts output_types, which names token vectors")
    if len(outputs) == 1 and outputs[0] is served.output and outputs[0].kind is not OutputKind.TOKENS:
        return msgspec.structs.replace(request, outputs=())
    return request


def _check_weights(request: EmbeddingsRequest) -> None:
    """Raise ``InvalidInput`` for what only vectors have."""
    if request.dtype is not EmbedDtype.FLOAT32:
        raise InvalidInput.at(
            request.dtype_param, f"{request.dtype.value} is a type of vectors, and weights are numbers"
        )
    if request.dimensions is not None:
        param = request.dimensions_param
        raise InvalidInput.at(param, "weights have no width; max_active_dims bounds how many there are")


def _routes(service: Service) -> list[ApiRoute]:
    models, started = service.models, int(time.time())

    def card(name: str, served: ServedModel) -> JsonObject:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "tessera",
            "max_model_len": served.pipeline.max_tokens,
            **described(service, served),
        }

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card(*entry) for entry in models.by_name.items()]})

    async def get_model(request: Request) -> Response:
        name = request.path_params["name"]
        served = models.find(name)
        return JSONResponse(card(served.served.check(name), served))

    routes: list[ApiRoute] = []
    # Infinity's clients, and some of Text-Embeddings-Inference's, put no /v1 before.
    for prefix in ("/v1", ""):
        routes += (
            service.endpoint.route(
                f"{prefix}/embeddings",
                _translate,
                name="create_embeddings",
                summary="Embed text and images",
                body=EMBEDDINGS.schema,
                answer=_ANSWER,
                kinds=VECTORS | TOKEN_VECTORS | SPARSE,
                application__octet_stream={"type": "string", "format": "binary"},
            ),
            get_route(
                *(f"{prefix}/models", list_models, _MODELS, 401),
                summary="The served models, by each of their names",
            ),
        )
    return [*routes, get_route("/v1/models/{name:path}", get_model, _MODEL, 401, 404, summary="One model")]


API: Final = ClientApi("OpenAI", _routes)
