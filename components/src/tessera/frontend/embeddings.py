"""``POST /v1/embeddings``: one HTTP request through parsing, the pipeline and formatting."""

from __future__ import annotations

import time
import uuid

from starlette.requests import Request
from starlette.responses import Response

from tessera.config import Limits
from tessera.errors import ModelNotFound, Overloaded
from tessera.frontend.deadline import Deadline
from tessera.frontend.exchange import read_body, until_disconnect
from tessera.frontend.formats import ResponseBody, Usage, embeddings_body
from tessera.frontend.inputs import EmbeddingsRequest, RequestLimits
from tessera.frontend.metrics import FrontendMetrics
from tessera.frontend.pipeline import Embedded, Pipeline
from tessera.frontend.shapes import parse_embeddings, read_json


class EmbeddingsRoute:
    """Admits at most ``limits.max_in_flight`` requests at a time; the rest are told to come back."""

    def __init__(self, pipeline: Pipeline, model: str, limits: Limits, metrics: FrontendMetrics) -> None:
        self._pipeline = pipeline
        self._model = model
        self._limits = limits
        self._metrics = metrics
        self._in_flight = 0
        metrics.in_flight.set_function(lambda: self._in_flight)

    async def __call__(self, request: Request) -> Response:
        if self._in_flight >= self._limits.max_in_flight:
            raise Overloaded(f"{self._in_flight} requests are being answered already", retry_after=1.0)
        self._in_flight += 1
        try:
            return await self._answer(request)
        finally:
            self._in_flight -= 1

    async def _answer(self, http: Request) -> Response:
        deadline = Deadline.after(self._limits.timeout_seconds)
        raw = await read_body(http, limit=self._limits.max_body_bytes, timeout=self._limits.timeout_seconds)
        request = parse_embeddings(
            read_json(raw), limits=RequestLimits(inputs=self._limits.max_inputs), models=(self._model,)
        )
        if request.model is not None and request.model != self._model:
            raise ModelNotFound(
                f"the model {request.model!r} is not served here, {self._model!r} is", param="model"
            )
        request_id = request.request_id or http.headers.get("x-request-id") or uuid.uuid4().hex
        embedded = await until_disconnect(
            http, self._pipeline.run(request, request_id=request_id, deadline=deadline)
        )
        body = self._format(request, embedded, request_id)
        headers = body.headers | {"x-request-id": request_id}
        if http.headers.get("x-tessera-timings") is not None:
            headers |= _timings(embedded)
        return Response(body.content, media_type=body.media_type, headers=headers)

    def _format(self, request: EmbeddingsRequest, embedded: Embedded, request_id: str) -> ResponseBody:
        usage = Usage(
            text_tokens=embedded.text_tokens,
            image_tokens=embedded.image_tokens,
            cached_tokens=embedded.cached_tokens,
        )
        return embeddings_body(
            embedded.vectors,
            request,
            model=self._model,
            identifier=f"embd-{request_id}",
            created=int(time.time()),
            usage=usage,
            failures=embedded.errors,
        )


def _timings(embedded: Embedded) -> dict[str, str]:
    """Milliseconds for each stage, for clients that send ``X-Tessera-Timings``."""
    timings = embedded.timings
    return {
        f"x-tessera-{name.removesuffix('_ms')}-ms": f"{getattr(timings, name):.2f}"
        for name in timings.__struct_fields__
    }
