"""``/tokenize``: vLLM's ``prompt``, TEI's ``inputs``, or any input that ``/v1/embeddings`` takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Annotated, Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tessera.errors import InvalidInput, ResponseTooLarge
from tessera.frontend.api.body import Flag, Form, Kind, about, unread
from tessera.frontend.api.openai import INERT, EmbeddingsBody, read_body, translate
from tessera.frontend.api.routes import ApiRoute
from tessera.frontend.api.schema import OPENAI_ERROR, STRING, TEXT, WHOLE, list_of, object_of, operation
from tessera.frontend.api.values import Json, json_object, string
from tessera.frontend.exchange import Exchange, exchange_of
from tessera.frontend.request import EmbeddingsRequest, Modality, RequestLimits
from tessera.frontend.service import ClientApi, Service
from tessera.frontend.serving.dispatch import Call
from tessera.frontend.serving.served import Served, ServedModel
from tessera.models.base import Int32Array, Model
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


# Fewer tokens are written on the event loop. 4.2 million took it 0.7 s, and as TEI has them each takes 5 µs.
_FEW: Final = 4096
# In JSON: as other answers' numbers, and what stands around most tokens' texts.
_NUMBER_BYTES: Final = 16
_TEXT_BYTES: Final = 32


def _translate(
    exchange: Exchange, value: Json, served: Served
) -> tei.TokenizeRequest | tuple[EmbeddingsRequest, bool]:
    body = json_object(value)
    if "inputs" in body:
        # Errors from here on are in TEI's shape, too.
        exchange.error_shape = tei.write_error
        return tei.parse_tokenize(body, served.limits)
    return parse_tokenize(body, served.limits, served.names)


async def _pieces(
    service: Service, exchange: Exchange, model: ServedModel, asked: tei.TokenizeRequest
) -> bytes:
    """Return TEI's answer."""
    call = Call(request_id=exchange.line.request_id, deadline=exchange.deadline, client=exchange.client)
    write = partial(tei.write_tokens, special=asked.special)
    written: list[bytes] = []
    nbytes = 0
    async for texts in model.pipeline.prompter.pieces(
        asked.texts, call, write, role=asked.role, instruction=asked.instruction
    ):
        written += texts
        more = sum(map(len, texts))
        nbytes += more
        _take(service, exchange, more, nbytes)
    return b"[%b]" % b",".join(written)


async def _counted(
    service: Service, exchange: Exchange, model: ServedModel, request: EmbeddingsRequest, spelled: bool
) -> bytes:
    """Return the answer to every other form."""
    call = service.endpoint.call(exchange, request, model.served)
    work = await model.pipeline.prepare(request, call)
    prompts = [prompt.tokens for prompt, _ in work.good.values()]
    count = sum(map(len, prompts))
    nbytes = count * (_NUMBER_BYTES + _TEXT_BYTES * spelled)
    _take(service, exchange, nbytes, nbytes)
    write = partial(_write, prompts, count, model.pipeline.max_tokens, model.model if spelled else None)
    return write() if count <= _FEW else await exchange.aside(service.threads, write)


def _take(service: Service, exchange: Exchange, more: int, nbytes: int) -> None:
    """Take ``more`` bytes of an answer that has ``nbytes`` with them; raises ``ResponseTooLarge``."""
    limit = service.settings.limits.max_response_bytes
    if nbytes > limit:
        raise ResponseTooLarge(
            f"the answer takes {nbytes} bytes or more, over the limit of {limit}; send fewer texts at a time"
        )
    if exchange.ticket is not None:
        exchange.ticket.take(more)


def _write(prompts: Sequence[Int32Array], count: int, max_tokens: int, spelling: Model | None) -> bytes:
    """Write it input by input: a writer keeps the interpreter until its end."""
    rows: list[bytes] = []
    for index, tokens in enumerate(prompts):
        row: dict[str, Any] = {"max_model_len": max_tokens} if len(prompts) == 1 else {"index": index}
        row |= {"count": len(tokens), "tokens": tokens}
        if spelling is not None:
            row["token_strs"] = list(map(spelling.token_text, tokens.tolist()))
        rows.append(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY))
    if len(rows) == 1:
        return rows[0]
    return b'{"max_model_len":%d,"count":%d,"data":[%b]}' % (max_tokens, count, b",".join(rows))


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
        exchange = exchange_of(request.scope)
        model, asked = await service.endpoint.read(request, partial(_translate, exchange))
        if isinstance(asked, tei.TokenizeRequest):
            content = await exchange.departure.during(_pieces(service, exchange, model, asked))
        else:
            content = await exchange.departure.during(_counted(service, exchange, model, *asked))
        return Response(content, media_type="application/json")

    described = operation(body=SCHEMA, answer=_ANSWER, error=_ERROR)
    return [ApiRoute("/tokenize", tokenize, summary="Count tokens without embedding", described=described)]


API: Final = ClientApi("Tessera", _routes, place=80)
