"""One HTTP request that embeds: admission, its body, a wire form's translation, the pipeline, the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tessera import tracing, wire
from tessera.errors import ModelNotFound
from tessera.frontend.api.formats import ResponseBody, Result
from tessera.frontend.api.openai import read_json
from tessera.frontend.api.request import EmbeddingsRequest, RequestLimits
from tessera.frontend.api.tei import parse_tei_tokenize, write_tei_tokens
from tessera.frontend.api.tokenize import wants_token_texts
from tessera.frontend.api.values import Json, json_object
from tessera.frontend.http.admission import RateLimiter, Ticket
from tessera.frontend.http.auth import Authenticator, client_of
from tessera.frontend.http.exchange import Turns, read_body, until_disconnect
from tessera.frontend.metrics import FrontendMetrics
from tessera.frontend.serving.pipeline import Pipeline
from tessera.frontend.settings import Limits
from tessera.logs import RequestLine, note
from tessera.tasks import Deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """A request in the service's own terms, and how its answer is written for the client."""

    request: EmbeddingsRequest
    write: Callable[[Result], ResponseBody]


Translate = Callable[[Json, RequestLimits, Collection[str]], Translated]
"""(parsed body, limits, served names) → what the body asks for; raises ``InvalidInput``."""


class Endpoint:
    """Answers what the gate has let in; the request's ticket is in its state."""

    def __init__(
        self,
        pipeline: Pipeline,
        model: str,
        limits: Limits,
        limiter: RateLimiter,
        metrics: FrontendMetrics,
    ) -> None:
        self._pipeline = pipeline
        self._model = model
        self._limits = limits
        self._limiter = limiter
        self._metrics = metrics
        self._turns = Turns()

    async def embed(self, http: Request, translate: Translate) -> Response:
        """The answer in the form that ``translate`` knows; errors are raised, for the route's own shape."""
        deadline = Deadline.after(self._limits.timeout_seconds)
        raw = await self._body(http)
        async with self._turns.take():
            with tracing.span("parse"):
                translated = translate(_parsed(http, raw), self._limits.request, (self._model,))
        request = translated.request
        self._check_model(request)
        request_id = _identify(http, request)
        note(inputs=len(request.inputs), images=sum(len(entry.images) for entry in request.inputs))
        key = getattr(http.state, "key_name", Authenticator.ANONYMOUS)
        work = self._pipeline.run(
            request,
            request_id=request_id,
            deadline=deadline,
            client=client_of(key),
            charge=partial(self._charge, http, key),
        )
        embedded = await until_disconnect(http, work)
        note(
            tokens=embedded.usage.total_tokens,
            cached_tokens=embedded.usage.cached_tokens,
            failed_inputs=len(embedded.errors) or None,
            **embedded.timings.spent(),
        )
        result = Result(embedded=embedded, model=self._model, request_id=request_id, created=int(time.time()))
        async with self._turns.take():
            with self._metrics.format_seconds.time(), tracing.span("format"):
                body = translated.write(result)
        headers = body.headers | {"x-request-id": request_id}
        if http.headers.get("x-tessera-timings") is not None:
            headers |= _timings(embedded.timings)
        return Response(body.content, media_type=body.media_type, headers=headers)

    async def tokenize(self, http: Request, translate: Callable[..., EmbeddingsRequest]) -> Response:
        """The tokens that the same inputs would be embedded as."""
        deadline = Deadline.after(self._limits.timeout_seconds)
        body = json_object(_parsed(http, await self._body(http)))
        if "inputs" in body:
            # Errors from here on in TEI's shape, too.
            http.state.answer_as = "/embed"
            texts, role, special = parse_tei_tokenize(body, self._limits.request)
            pieces = await until_disconnect(http, self._pipeline.pieces(texts, role))
            return JSONResponse(write_tei_tokens(pieces, special=special))
        key = getattr(http.state, "key_name", Authenticator.ANONYMOUS)
        spelled = wants_token_texts(body)
        request = translate(body, self._limits.request, (self._model,))
        _identify(http, request)
        self._check_model(request)
        prompts, _ = await until_disconnect(
            http, self._pipeline.prompts(request, deadline=deadline, client=client_of(key))
        )
        tokens = [prompt.tokens.tolist() for prompt in prompts if not isinstance(prompt, Exception)]
        rows: list[dict[str, Any]] = [{"count": len(ids), "tokens": ids} for ids in tokens]
        if spelled:
            for row in rows:
                row["token_strs"] = [self._pipeline.token_text(token) for token in row["tokens"]]
        head = {"max_model_len": self._pipeline.max_tokens}
        if len(rows) == 1:
            return JSONResponse(head | rows[0])
        return JSONResponse(
            head
            | {
                "count": sum(len(row["tokens"]) for row in rows),
                "data": [{"index": index, **row} for index, row in enumerate(rows)],
            }
        )

    def _charge(self, http: Request, key: str, tokens: int, tiles: int) -> None:
        note(tokens=tokens, tiles=tiles)
        ticket: Ticket = http.state.ticket
        ticket.charge(tokens, tiles)
        self._limiter.charge(key, tokens)

    async def _body(self, http: Request) -> bytes:
        with tracing.span("read body") as span:
            raw = await read_body(
                http, limit=self._limits.max_body_bytes, timeout=self._limits.timeout_seconds
            )
            span.set_attribute("http.request.body.size", len(raw))
        return raw

    def _check_model(self, request: EmbeddingsRequest) -> None:
        if request.model is not None and request.model != self._model:
            raise ModelNotFound(
                f"the model {request.model!r} is not served here, {self._model!r} is", param="model"
            )


def _parsed(http: Request, raw: bytes) -> Json:
    return read_json(raw, http.headers.get("content-type", ""))


def _identify(http: Request, request: EmbeddingsRequest) -> str:
    """The request's id: its body may give another one than its head."""
    line: RequestLine = http.state.line
    if request.request_id is not None:
        line.request_id = request.request_id
    return line.request_id


def _timings(timings: wire.Timings) -> dict[str, str]:
    """Milliseconds for each stage, for clients that send ``X-Tessera-Timings``."""
    return {
        f"x-tessera-{name.removesuffix('_ms')}-ms": f"{getattr(timings, name):.2f}"
        for name in timings.__struct_fields__
    }
