"""A worker as a model of Dynamo's own: what its stock frontend sends, translated and embedded here."""

from __future__ import annotations

import logging
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from tessera.budgets import Budget
from tessera.errors import ConfigError, InvalidInput, MediaFetchError, TesseraError
from tessera.frontend.api.formats import finish
from tessera.frontend.api.openai import parse_embeddings
from tessera.frontend.exchange import Exchange
from tessera.frontend.http.errors import render
from tessera.frontend.media import ImageLimits, MediaBudget, MediaLoader, MediaPolicy
from tessera.frontend.metrics import FrontendMetrics
from tessera.frontend.request import ROLE_SUFFIXES, EmbeddingsRequest, EmbedDtype, ImageSource
from tessera.frontend.serving.dispatch import Call
from tessera.frontend.serving.local import Ask, LocalEmbedder
from tessera.frontend.serving.pipeline import Pipeline, Result
from tessera.frontend.serving.served import not_found
from tessera.frontend.settings import Limits
from tessera.logs import RequestLine
from tessera.models.base import Model, OutputKind
from tessera.rpc import ModelServer, Runtime, Server
from tessera.tasks import Deadline

log = logging.getLogger(__name__)


class CarriedMedia(MediaLoader):
    """Takes data URLs, under the frontend's policy; a worker fetches nothing and reads no files."""

    async def read_named(self, source: ImageSource, deadline: Deadline, budget: MediaBudget) -> bytes:
        raise MediaFetchError(f"{source.param}: only data URLs are taken here", param=source.param)


ROUTE: Final = "dynamo"
"""What the metrics call this way in."""

_ANNOTATIONS: Final = "nvext"
"""The frontend's own extensions, which ask for nothing that an embedding has."""


def names_of(names: Sequence[str]) -> tuple[str, ...]:
    """The model's own names, and for each those that say which side of a retrieval pair an input is on."""
    return tuple(name + suffix for name in names for suffix in ("", *ROLE_SUFFIXES))


class DynamoModel:
    """Answers embeddings requests with the worker's own engine.

    The frontend passes on the model's name, the input (strings or token ids) and OpenAI's and vLLM's options;
    it leaves out whatever says which side of a retrieval pair an input is on. So each name of the model has a
    second and a third one for that, as NIM's models have: ``names`` lists all. Answers say the first.
    """

    def __init__(self, model: Model, names: Sequence[str], ask: Ask, limits: Limits) -> None:
        self.names = names_of(names)
        self._served = tuple(names)
        self._limits = limits
        self._metrics = FrontendMetrics()
        self._in_flight = Budget(lambda: limits.max_in_flight, unit="requests in flight")
        media = CarriedMedia(MediaPolicy(), limits.images)
        own = self._metrics.of(names[0])
        self._pipeline = Pipeline(model, media, LocalEmbedder(ask, model), limits, own)

    def render_metrics(self) -> str:
        return self._metrics.render().decode()

    async def answer(self, body: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        """The answer's body; raises the first input's error."""
        started, outcome = time.perf_counter(), "200"
        try:
            return await self._answer(body, request_id)
        except Exception as error:
            outcome = str(render(error).status)
            code = error.code if isinstance(error, TesseraError) else TesseraError.code
            self._metrics.errors.labels(ROUTE, code, self._served[0]).inc()
            raise
        finally:
            self._metrics.requests.labels(ROUTE, outcome, self._served[0]).inc()
            self._metrics.latency.labels(ROUTE, self._served[0]).observe(time.perf_counter() - started)

    async def _answer(self, body: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        self._in_flight.hold("", 1)
        try:
            deadline = Deadline.after(self._limits.timeout_seconds)
            exchange = Exchange(line=RequestLine(request_id), deadline=deadline, path=ROUTE)
            request = self._read(body)
            call = Call(request_id=request_id, deadline=deadline, priority=request.priority)
            work = await self._pipeline.prepare(request, call)
            exchange.pay(work.cost.tokens, work.cost.units, 0)
            result = await self._pipeline.embed(work, call)
            return self._write(request, result)
        finally:
            self._in_flight.give("", 1)

    def _read(self, body: Mapping[str, Any]) -> EmbeddingsRequest:
        fields = {name: value for name, value in body.items() if name != _ANNOTATIONS}
        request = parse_embeddings(fields, limits=self._limits.request, models=self._served)
        if request.model is not None and request.model not in self._served:
            raise not_found(request.model, self._served)
        if request.dtype is not EmbedDtype.FLOAT32:
            raise InvalidInput("embed_dtype: only float32 can be sent by this way", param="embed_dtype")
        for name, asked in (("return_multivector", request.multivector), ("endianness", request.big_endian)):
            if asked:
                raise InvalidInput(f"{name}: this way gives one little-endian vector an input", param=name)
        # There is no place in the answer for the error of one input beside the vectors of others.
        return msgspec.structs.replace(request, allow_partial=False)

    def _write(self, request: EmbeddingsRequest, result: Result) -> dict[str, Any]:
        # Always base64 of little-endian float32: the frontend makes numbers of it for clients that want them.
        vectors = result.rows.values
        width = request.dimensions or vectors.shape[1]
        rows = finish(vectors, width=width, normalize=request.normalize)
        total = result.usage.total_tokens
        return {
            "object": "list",
            "model": self._served[0],
            "data": [
                {"object": "embedding", "index": index, "embedding": b64encode(row).decode("ascii")}
                for index, row in enumerate(rows)
            ],
            "usage": {"prompt_tokens": total, "total_tokens": total},
        }


def addresses(runtime: Runtime, names: Sequence[str]) -> tuple[str, ...]:
    """Where discovery lists the model's names, one at each."""
    return tuple(runtime.address("embed", f"model{index or ''}") for index in range(len(names_of(names))))


def model_servers(
    runtime: Runtime, server: Server, model: Model, names: Sequence[str], *, max_image_pixels: int
) -> Sequence[ModelServer]:
    """One for each name of the model, not started yet.

    What comes in that way is answered through ``server``, so that it is logged, traced and drained like the
    rest. Raises ``ConfigError`` for a model whose output is no vector.
    """
    if model.output.kind is not OutputKind.VECTOR:
        raise ConfigError(
            f"--dynamo-model serves vectors, and {model.family} gives {model.output.kind.value}"
        )
    limits = Limits(images=ImageLimits(max_pixels=max_image_pixels))
    served = DynamoModel(model, names, server.answer, limits)
    server.expose_metrics(served.render_metrics)
    log.info("will also be served as models of Dynamo's own: %s", ", ".join(served.names))
    return [
        ModelServer(runtime, address, each, served.answer)
        for address, each in zip(addresses(runtime, names), served.names, strict=True)
    ]
