"""Text-Embeddings-Inference: ``/embed`` and ``/embed_all``, vectors and matrices, and its ``/rerank``.

``/`` and SageMaker's ``/invocations`` are ``/rerank`` where a reranker is served and ``/embed`` elsewhere;
where both are, a body with a ``query`` is for the reranker. ``/info`` is of the first model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

import msgspec
import orjson
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tessera import __version__
from tessera.errors import EmptyInput, InvalidInput, PayloadTooLarge, Unavailable
from tessera.frontend.api.body import (
    CutOrError,
    Flag,
    Form,
    Instruction,
    ModelName,
    MostResults,
    String,
    Text,
    Width,
    about,
    named,
    unread,
)
from tessera.frontend.api.content import InputBuilder, read_tokens
from tessera.frontend.api.endpoint import (
    DENSE,
    VECTORS,
    Choice,
    Translated,
    TranslatedScores,
)
from tessera.frontend.api.formats import ResponseBody, json_matrix, matrices
from tessera.frontend.api.openai import MATRIX, finished, sparse_weights
from tessera.frontend.api.routes import ApiRoute, get_route
from tessera.frontend.api.schema import (
    BOOLEAN,
    MAYBE_TEXT,
    NUMBERS,
    STRING,
    TEXT,
    TOKENS,
    WHOLE,
    Schema,
    list_of,
    object_of,
    operation,
)
from tessera.frontend.api.values import Json, JsonObject, expected, is_list, plain_list, string
from tessera.frontend.http.errors import Failure
from tessera.frontend.request import EmbeddingsRequest, Input, RequestLimits, ScoreRequest
from tessera.frontend.service import ClientApi, Service
from tessera.frontend.serving.pipeline import Result, Scores
from tessera.frontend.serving.served import Served
from tessera.models.base import Output, OutputKind, Piece, Role, Truncate
from tessera.models.declared import NAMED_ROLES
from tessera.nn.spec import Pooling
from tessera_apis.scores import (
    DOCUMENTS_EXAMPLE,
    QUERY_EXAMPLE,
    SCORE,
    document_builder,
    query_builder,
    ranking,
)

OWN: Final = ("/", "/invocations")
DIRECTIONS: Final = {
    "Left": Truncate.START,
    "left": Truncate.START,
    "Right": Truncate.END,
    "right": Truncate.END,
}
_TEXT_OR_TOKENS: Final[Schema] = {"anyOf": [STRING, TOKENS]}


_PROMPT: Final = "Whether the inputs are queries or passages to be found, by the names of prompts."
_PROMPT_NAME: Final = (
    "The prompt before the inputs: query, passage, document, or a name that the checkpoint has for one."
)


class _Options(msgspec.Struct, kw_only=True):
    truncate: CutOrError = False
    truncation_direction: Annotated[
        Truncate, named(DIRECTIONS, "Left or Right"), about("The side that is cut.")
    ] = Truncate.END
    model: ModelName = None
    instruction: Instruction = None

    def truncation(self) -> Truncate:
        return self.truncation_direction if self.truncate else Truncate.NONE


class TeiEmbedAllRequest(_Options, kw_only=True):
    """Declares the body of ``/embed_all`` and ``/embed_sparse``, whose rows have the model's own width."""

    inputs: Annotated[
        Json,
        unread({"anyOf": [*_TEXT_OR_TOKENS["anyOf"], list_of(_TEXT_OR_TOKENS)]}),
        about("A text or its tokens, or a list of such.", "a yellow heart", ["a yellow heart", "a triangle"]),
    ]
    prompt_name: Annotated[Text, about(_PROMPT_NAME, "query")] = None
    normalize: Annotated[Flag, about("Whether vectors have length 1.")] = True


class TeiEmbedRequest(TeiEmbedAllRequest, kw_only=True):
    """Declares the body of ``/embed``."""

    dimensions: Width = None


class TeiTokenizeRequest(msgspec.Struct, kw_only=True):
    """Declares a body of ``/tokenize`` in TEI's form."""

    inputs: Annotated[
        Json,
        unread({"anyOf": [STRING, list_of(STRING)]}),
        about("Texts in TEI's form, alone or with prompt_name.", "a yellow heart"),
    ]
    model: Annotated[
        Json, unread(STRING), about("The name of a model.", "nvidia/llama-nemotron-embed-vl-1b-v2")
    ] = None
    add_special_tokens: Annotated[
        Flag, about("Whether the tokens of the model's own prompt are among them.")
    ] = True
    prompt_name: Annotated[Role | None, named(NAMED_ROLES), about(_PROMPT)] = None
    instruction: Instruction = None


class TeiRerankRequest(_Options, kw_only=True):
    """Declares TEI's body of ``/rerank``, texts alone; ``top_n`` is litellm's."""

    query: Annotated[String, about("What is looked for.", QUERY_EXAMPLE)]
    texts: Annotated[Json, unread(list_of(STRING)), about("The documents, in TEI's form.", DOCUMENTS_EXAMPLE)]
    raw_scores: Annotated[Flag, about("Whether scores are the model's logits.")] = False
    return_text: Annotated[Flag, Meta(description="Whether texts come back, in TEI's form.")] = False
    top_n: MostResults = None


EMBED: Final = Form(TeiEmbedRequest)
EMBED_SPARSE: Final = Form(TeiEmbedAllRequest, title="TeiEmbedSparseRequest")
EMBED_ALL: Final = Form(TeiEmbedAllRequest)
TOKENIZE: Final = Form(TeiTokenizeRequest)
RERANK: Final = Form(TeiRerankRequest)


def parse_tei(body: TeiEmbedAllRequest, limits: RequestLimits) -> EmbeddingsRequest:
    builder = InputBuilder.of(body.instruction, None, limits)
    if body.prompt_name is not None:
        builder = builder.named(body.prompt_name)
    given = _given(body.inputs, limits)
    if is_list(given) and _is_one(given[0]):
        inputs = tuple(_read(entry, f"inputs[{index}]", builder) for index, entry in enumerate(given))
    else:
        inputs = (_read(given, "inputs", builder),)
    return EmbeddingsRequest(
        inputs=inputs,
        model=body.model,
        dimensions=body.dimensions if isinstance(body, TeiEmbedRequest) else None,
        normalize=body.normalize,
        truncate=body.truncation(),
    )


def _is_one(value: Json) -> bool:
    """Whether it is one input of several: a text, or token ids."""
    return isinstance(value, str) or is_list(value)


def _given(given: Json, limits: RequestLimits) -> Json:
    """TEI tells an empty batch and one that is too large from other malformed requests."""
    if given == []:
        raise EmptyInput("`inputs` cannot be empty", param="inputs")
    if is_list(given) and _is_one(given[0]) and len(given) > limits.inputs:
        raise PayloadTooLarge(
            f"batch size {len(given)} > maximum allowed batch size {limits.inputs}", param="inputs"
        )
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """TEI's ``/tokenize``: texts with their paths, and whether special tokens are wanted."""

    texts: tuple[tuple[str, str], ...]
    role: Role
    instruction: str | None
    special: bool


def parse_tokenize(value: Json, limits: RequestLimits) -> TokenizeRequest:
    body = TOKENIZE.read(value)
    builder = InputBuilder.of(body.instruction, body.prompt_name, limits)
    given = _given(body.inputs, limits)
    values = given if is_list(given) else [given]
    # What is no batch fails at its first item.
    values = values[: limits.inputs]
    paths = [f"inputs[{index}]" if is_list(given) else "inputs" for index in range(len(values))]
    texts = tuple(
        (builder.text(string(value, path), path), path) for value, path in zip(values, paths, strict=True)
    )
    return TokenizeRequest(
        texts=texts,
        role=body.prompt_name or Role.NONE,
        instruction=builder.instruction,
        special=body.add_special_tokens,
    )


# Of JSON that is written at once.
_PIECES: Final = 4096


def write_tokens(pieces: Sequence[Piece], *, special: bool) -> bytes:
    """Write the tokens of a text as JSON, some at a time: a writer keeps the interpreter until its end."""
    wanted = [piece for piece in pieces if special or piece.start is not None]
    written = (
        orjson.dumps(list(map(_token, wanted[first : first + _PIECES])))[1:-1]
        for first in range(0, len(wanted), _PIECES)
    )
    return b"[%b]" % b",".join(written)


def _token(piece: Piece) -> dict[str, Json]:
    return {
        "id": piece.token,
        "text": piece.text,
        "special": piece.start is None,
        "start": piece.start,
        "stop": piece.stop,
    }


def write_tei(request: EmbeddingsRequest, served: Served, result: Result) -> ResponseBody:
    (output,) = served.asked(request.outputs)
    values = finished(result.rows.values, request, output)
    tokens = output.kind is OutputKind.TOKENS
    rows = [json_matrix(matrix) for matrix in matrices(values, result.rows.bounds)] if tokens else values
    return ResponseBody.of_json(rows, {"x-compute-tokens": str(result.usage.text_tokens)})


def _read(value: Json, param: str, builder: InputBuilder) -> Input:
    if isinstance(value, str):
        return builder.build((value,), param)
    if is_list(value) and value:
        return read_tokens(value, param, builder)
    raise expected(param, "text or token ids", value)


def _translate(
    form: Form[TeiEmbedRequest] | Form[TeiEmbedAllRequest],
    kind: OutputKind,
    body: Json,
    served: Served,
) -> Translated:
    request = msgspec.structs.replace(parse_tei(form.read(body), served.limits), outputs=served.of_kind(kind))
    write = write_sparse if kind is OutputKind.SPARSE else partial(write_tei, request, served)
    return Translated(request=request, write=write)


def write_sparse(result: Result) -> ResponseBody:
    """The weights of each input, ascending by token id."""
    rows = []
    for part in result.rows:
        weights, ids = sparse_weights(part)
        pairs = zip(ids.tolist(), weights, strict=True)
        rows.append([{"index": index, "value": value} for index, value in pairs])
    return ResponseBody.of_json(rows, {"x-compute-tokens": str(result.usage.text_tokens)})


def parse_rerank(value: Json, served: Served) -> TranslatedScores:
    body, limits = RERANK.read(value), served.limits
    asked = query_builder(body.instruction, limits)
    query = asked.build((asked.text(body.query, "query"),), "query")
    texts = _texts(body.texts, limits)
    builder = document_builder(limits)
    documents = tuple(
        builder.build((builder.text(text, param),), param)
        for param, text in ((f"texts[{index}]", text) for index, text in enumerate(texts))
    )
    request = ScoreRequest(
        queries=(query,),
        documents=documents,
        model=body.model,
        truncate=body.truncation(),
    )
    returned = texts if body.return_text else ()
    write = partial(write_rerank, returned, logits=body.raw_scores, most=body.top_n)
    return TranslatedScores(request=request, write=write, copies=1 if returned else 0)


def _texts(given: Json, limits: RequestLimits) -> list[str]:
    if given == []:
        raise EmptyInput("`texts` cannot be empty", param="texts")
    given = plain_list(given, "texts", "a list of texts")
    if len(given) > limits.documents:
        raise InvalidInput(
            f"batch size {len(given)} > maximum allowed batch size {limits.documents}", param="texts"
        )
    return [string(text, f"texts[{index}]") for index, text in enumerate(given)]


def write_rerank(texts: Sequence[str], scores: Scores, *, logits: bool, most: int | None) -> ResponseBody:
    """``texts`` are those that come back."""
    ranks = ranking(scores, "score", logits=logits, most=most, text=texts)
    return ResponseBody.of_json(ranks, {"x-compute-tokens": str(scores.usage.text_tokens)})


_ERROR_TYPES: Final = {
    401: "Unauthorized",
    413: "Validation",
    429: "Overloaded",
    503: "Unhealthy",
    504: "Overloaded",
}


def write_error(failure: Failure) -> tuple[int, JsonObject]:
    status, error = failure.status, failure.error
    kind = "Validation" if status < 500 else "Backend"
    if error["code"] == EmptyInput.code:
        kind = "Empty"
    elif status == 400:
        # A malformed request is a 422 here.
        status = 422
    return status, {"error": error["message"], "error_type": _ERROR_TYPES.get(status, kind)}


ERROR: Final = object_of(error=TEXT, error_type=TEXT)

_WEIGHTS: Final = list_of(object_of(index=WHOLE, value={"type": "number"}))
RERANK_ANSWER: Final = list_of(object_of(optional=("text",), index=WHOLE, score=SCORE, text=TEXT))


def _routes(service: Service) -> list[ApiRoute]:
    endpoint = service.endpoint

    async def own(request: Request) -> Response:
        if await _asks_for_scores(service, request):
            return await endpoint.answer(request, parse_rerank, Choice(DENSE, OutputKind.SCORE))
        return await endpoint.answer(request, partial(_translate, EMBED, OutputKind.VECTOR), Choice(VECTORS))

    async def info(request: Request) -> Response:
        """Null for what is not known here."""
        return JSONResponse(_info(service))

    described = operation(
        body={"anyOf": [EMBED.schema, RERANK.schema]},
        answer={"anyOf": [list_of(NUMBERS), RERANK_ANSWER]},
        error=ERROR,
        kinds=VECTORS | {OutputKind.SCORE},
    )
    summary = "What the served model does: embed text, or order texts by their relevance"
    forms: tuple[tuple[str, str, Form[Any], OutputKind, Schema], ...] = (
        ("embed", "Embed text", EMBED, OutputKind.VECTOR, NUMBERS),
        ("embed_all", "Vectors of each token of a text", EMBED_ALL, OutputKind.TOKENS, MATRIX),
        ("embed_sparse", "Weights of token ids of a text", EMBED_SPARSE, OutputKind.SPARSE, _WEIGHTS),
    )
    return [
        *(
            endpoint.route(
                f"/{name}",
                partial(_translate, form, kind),
                name=name,
                summary=text,
                body=form.schema,
                answer=list_of(rows),
                error=ERROR,
                kinds=frozenset((kind,)),
            )
            for name, text, form, kind, rows in forms
        ),
        *(ApiRoute(path, own, summary=summary, described=described) for path in OWN),
        get_route("/info", info, _INFO, 401, summary="What is served, as TEI says it"),
    ]


_LABEL: Final = "LABEL_0"
_POOLINGS: Final[dict[Pooling, str]] = {"mean": "mean", "last": "last_token", "first": "cls", "none": "none"}


def _model_type(output: Output) -> JsonObject:
    if output.kind is OutputKind.SCORE:
        return {"reranker": {"id2label": {"0": _LABEL}, "label2id": {_LABEL: 0}}}
    if output.kind is OutputKind.SPARSE:
        return {"embedding": {"pooling": "splade"}}
    pooling: Pooling | None = "none" if output.kind is OutputKind.TOKENS else output.pooling
    return {"embedding": {"pooling": pooling and _POOLINGS.get(pooling)}}


def _info(service: Service) -> JsonObject:
    limits, model = service.settings.limits, next(iter(service.models), None)
    if model is None:
        raise Unavailable("no model is there yet", retry_after=1.0)
    source, served = model.settings.origin, model.served
    dtypes = sorted({worker.dtype for worker in model.workers.embed.ready.values()})
    return {
        "model_id": (source and source.repository) or served.model,
        "model_sha": (source and source.commit) or None,
        "model_dtype": dtypes[0] if dtypes else None,
        "served_model_name": served.model,
        "model_type": _model_type(served.output),
        "max_concurrent_requests": limits.max_in_flight,
        "max_input_length": model.pipeline.max_tokens,
        "max_batch_tokens": None,
        "max_batch_requests": None,
        "max_client_batch_size": served.limits.inputs,
        "auto_truncate": False,
        "tokenization_workers": None,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


async def _asks_for_scores(service: Service, request: Request) -> bool:
    """Whether a request at a path of TEI's own is for a reranker: by its body, where both are served."""
    kinds = {model.served.output.kind for model in service.models}
    if OutputKind.SCORE not in kinds or VECTORS.isdisjoint(kinds):
        return OutputKind.SCORE in kinds
    body = await service.endpoint.json(request)
    return isinstance(body, dict) and "query" in body


_NONE: Final[Schema] = {"type": "null"}
_INFO: Final = object_of(
    optional=("max_batch_tokens", "max_batch_requests", "tokenization_workers", "sha", "docker_label"),
    model_id=TEXT,
    model_sha=MAYBE_TEXT,
    model_dtype=MAYBE_TEXT,
    served_model_name=TEXT,
    model_type={"type": "object"},
    max_concurrent_requests=WHOLE,
    max_input_length=WHOLE,
    max_batch_tokens=_NONE,
    max_batch_requests=_NONE,
    max_client_batch_size=WHOLE,
    auto_truncate=BOOLEAN,
    tokenization_workers=_NONE,
    version=TEXT,
    sha=_NONE,
    docker_label=_NONE,
)


API: Final = ClientApi("Text-Embeddings-Inference", _routes, error=write_error, place=30)
