"""``/tokenize``: vLLM's ``prompt``, TEI's ``inputs``, or any input that ``/v1/embeddings`` takes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tessera.errors import InvalidInput
from tessera.frontend.api.body import Flag, Form, Kind, about, unread
from tessera.frontend.api.endpoint import Endpoint
from tessera.frontend.api.openai import INERT, EmbeddingsBody, read_body, translate
from tessera.frontend.api.routes import ApiRoute
from tessera.frontend.api.schema import OPENAI_ERROR, STRING, TEXT, WHOLE, list_of, object_of, operation
from tessera.frontend.api.values import Json, json_object, string
from tessera.frontend.exchange import exchange_of
from tessera.frontend.request import EmbeddingsRequest, Modality, RequestLimits
from tessera.frontend.service import ClientApi, Service
from tessera.frontend.serving.dispatch import Call
from tessera_apis import tei


class TokenizeRequest(EmbeddingsBody, kw_only=True):
    """Declares a body of ``/tokenize`` that is not in TEI's form; ``inputs`` is for the error alone."""

    prompt: Annotated[
        str | None,
        Kind(string, STRING),
        about("A text, in place of `input` and `messages`.", "a yellow heart"),
    ] = None
    return_token_strs: Annotated[Flag, about("Whether tokens come as texts, too.")] = False
    inputs: Annotated[Json, unread({})] = None


FORM: Final = Form(TokenizeRequest, inert={**INERT, "late_chunking": (False,)})
SCHEMA: Final = {
    **FORM.schema,
    "properties": FORM.schema["properties"]
    | {name: tei.TOKENIZE.schema["properties"][name] for name in ("inputs", "prompt_name")},
}


def parse_tokenize(
    value: Json, limits: RequestLimits, models: Collection[str]
) -> tuple[EmbeddingsRequest, bool]:
    """Return the request, and whether tokens are wanted as texts, too.

    A prompt is text and nothing else, so that a data URL in it is counted as what it says.
    """
    body = read_body(FORM, value)
    if body.prompt is not None:
        if body.input is not None or body.messages is not None:
            raise InvalidInput.at("prompt", "expected either prompt, input or messages")
        body.input, body.modality = body.prompt, Modality.TEXT.value
    return translate(body, limits, models), body.return_token_strs


async def _tokenize(endpoint: Endpoint, http: Request) -> Response:
    """The tokens that the same inputs would be embedded as."""
    exchange = exchange_of(http.scope)
    body = json_object(await endpoint.json(http))
    exchange.let_go()
    model = endpoint.choose(exchange, body)
    served, pipeline = model.served, model.pipeline
    if "inputs" in body:
        # Errors from here on are in TEI's shape, too.
        exchange.error_shape = tei.write_error
        asked = tei.parse_tokenize(body, served.limits)
        call = Call(request_id=exchange.line.request_id, deadline=exchange.deadline, client=exchange.client)
        cut = pipeline.pieces(asked.texts, call, role=asked.role, instruction=asked.instruction)
        return JSONResponse(tei.write_tokens(await exchange.during(cut), special=asked.special))
    request, spelled = parse_tokenize(body, served.limits, served.names)
    call = endpoint.call(exchange, request, served)
    work = await exchange.during(pipeline.prepare(request, call))
    tokens = [prompt.tokens.tolist() for prompt, _ in work.good.values()]
    rows: list[dict[str, Any]] = [{"count": len(ids), "tokens": ids} for ids in tokens]
    if spelled:
        for row in rows:
            row["token_strs"] = [model.model.token_text(token) for token in row["tokens"]]
    answer = rows[0]
    if len(rows) > 1:
        data = [{"index": index, **row} for index, row in enumerate(rows)]
        answer = {"count": sum(map(len, tokens)), "data": data}
    return JSONResponse({"max_model_len": pipeline.max_tokens, **answer})


_TOKENS: Final = list_of(WHOLE)
_TEXTS: Final = list_of(TEXT)
_PIECE: Final = object_of(
    id=WHOLE,
    text=TEXT,
    special={"type": "boolean"},
    start={"type": ["integer", "null"]},
    stop={"type": ["integer", "null"]},
)
_PLAIN: Final = object_of(
    optional=("tokens", "token_strs", "data"),
    count=WHOLE,
    max_model_len=WHOLE,
    tokens=_TOKENS,
    token_strs=_TEXTS,
    data=list_of(
        object_of(optional=("token_strs",), index=WHOLE, count=WHOLE, tokens=_TOKENS, token_strs=_TEXTS)
    ),
)
_ANSWER: Final = {"anyOf": [_PLAIN, list_of({"type": "array", "items": _PIECE})]}
_ERROR: Final = {"anyOf": [OPENAI_ERROR, tei.ERROR]}


def _routes(service: Service) -> list[ApiRoute]:
    async def tokenize(request: Request) -> Response:
        """One input's ``tokens``, or ``data`` with those of each of several."""
        return await _tokenize(service.endpoint, request)

    described = operation(body=SCHEMA, answer=_ANSWER, error=_ERROR)
    return [ApiRoute("/tokenize", tokenize, summary="Count tokens without embedding", described=described)]


API: Final = ClientApi("Tessera", _routes, place=80)
