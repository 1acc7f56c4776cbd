"""One HTTP request that embeds: its body, a client's form of it, the pipeline, and the answer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from tessera import tracing, wire
from tessera.errors import (
    InvalidInput,
    ModelNotFound,
    PayloadTooLarge,
    RequestCancelled,
    RequestTimeout,
    ResponseTooLarge,
    UnsupportedMedia,
    UnsupportedRoute,
)
from tessera.frontend.admission.rate import RateLimiter
from tessera.frontend.admission.room import Ticket
from tessera.frontend.api.formats import ResponseBody, frame_bytes, row_bytes
from tessera.frontend.api.values import BRACKETS, BRACKETS_AN_INPUT, Json, read_json
from tessera.frontend.http.auth import Authenticator, client_of
from tessera.frontend.metrics import FrontendMetrics
from tessera.frontend.request import (
    EmbeddingsRequest,
    EmbedDtype,
    EncodingFormat,
    ScoreRequest,
    split_model,
)
from tessera.frontend.serving.dispatch import Call
from tessera.frontend.serving.models import Models
from tessera.frontend.serving.pipeline import Cost, Result, Scores
from tessera.frontend.serving.served import Served, ServedModel
from tessera.frontend.settings import Limits
from tessera.logs import RequestLine, note
from tessera.models.base import OutputKind
from tessera.tasks import Deadline, Departure, Left

T = TypeVar("T")

ALL_KINDS: Final = frozenset(OutputKind)
VECTORS: Final = frozenset((OutputKind.VECTOR,))
TOKEN_VECTORS: Final = frozenset((OutputKind.TOKENS,))
# Of rows: writing an answer of more than these takes long enough for other requests to notice, 1 ms. With two
# clients that ask for pages of 50 MB of JSON, one in a hundred calls of /live takes 59 ms, and took 285.
_LARGE_BYTES: Final = 1 << 18
# Likewise of one vector for each input: 512 of 2048 numbers take 35 ms as JSON.
_LARGE_VECTORS_BYTES: Final = 1 << 22
# What a score and its index take in any client's JSON: 64 each, and some answers have them twice.
_SCORE_BYTES: Final = 128
# What Infinity's client sends as the model where it is given none.
_UNSPECIFIED: Final = "default/not-specified"


async def read_body(request: Request, *, limit: int, timeout: float) -> bytes:
    """The whole body; ``limit`` in bytes, ``timeout`` in seconds.

    The announced length is refused before a byte is read, and what arrives is counted as well. A compressed
    body is refused: how large it becomes is known only after it has been decompressed.
    """
    coding = header(request, b"content-encoding") or b""
    if coding.strip().lower() not in (b"", b"identity"):
        raise UnsupportedMedia("the body must be sent as it is, without a Content-Encoding")
    announced = header(request, b"content-length") or b""
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size, more = 0, True
    # Most bodies come with their heads, and need no clock.
    whole = request.scope["state"].get("whole", False)
    try:
        async with nullcontext() if whole else asyncio.timeout(timeout):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise RequestCancelled("the client went away while it was sending")
                chunk, more = message.get("body", b""), message.get("more_body", False)
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
    except TimeoutError as error:
        raise RequestTimeout(f"the request body did not arrive within {timeout:.0f} s") from error
    return b"".join(chunks)


def header(request: Request, name: bytes) -> bytes | None:
    """The first of the headers with this name, which is in lower case.

    Starlette's ``Headers`` makes an object for each request, and strings of names and values.
    """
    headers: list[tuple[bytes, bytes]] = request.scope["headers"]
    for key, value in headers:
        if key == name:
            return value
    return None


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than the {limit} bytes that a request may have")


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; a client that goes away meanwhile cancels it (``RequestCancelled``)."""
    departure: Departure = request.scope["state"]["departure"]
    try:
        return await departure.during(work)
    except Left:
        raise RequestCancelled("the client went away") from None


# Pieces of work in one round of the event loop, at most, and the time after which no other begins in it. A
# short request is read in 30 µs: with a round of its own for each, a round costs more than the piece.
_PIECES: Final = 8
_ROUND_SECONDS: Final = 1e-3


class LoopFairness:
    """Lets the event loop look at the network between pieces of work that block it.

    Reading a request or writing an answer takes from 30 µs to several milliseconds. When a hundred are ready
    together, a client that comes then, to be refused or to ask for ``/health``, would wait for all of them.
    Owned by one event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._under_way = False
        # Pieces that have begun, or may begin, in this round, and the seconds that they took.
        self._begun = 0
        self._spent = 0.0
        self._round_ends = False
        self._started = 0.0

    def turn(self) -> LoopFairness:
        """Nothing may be awaited inside; turns are given in the order in which they were asked for."""
        return self

    async def __aenter__(self) -> None:
        if self._under_way or self._waiting or self._begun >= _PIECES or self._spent >= _ROUND_SECONDS:
            await self._wait()
        else:
            self._begun += 1
        self._under_way = True
        self._started = time.perf_counter()

    async def __aexit__(self, *_: object) -> None:
        self._under_way = False
        self._spent += time.perf_counter() - self._started
        self._end_round()

    async def _wait(self) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            # Else it had been given a turn, which nobody takes.
            self._end_round()
            raise

    def _end_round(self) -> None:
        if not self._round_ends:
            self._round_ends = True
            # In the loop's next round, not in this one.
            self._loop.call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self._round_ends = False
        # As many as would take their time if they were like the last ones.
        each = self._spent / max(1, self._begun)
        self._begun, self._spent = 0, 0.0
        if self._under_way:
            return
        while self._waiting and self._begun < _PIECES and self._begun * each < _ROUND_SECONDS:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                self._begun += 1
        if self._begun:
            self._end_round()


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """A request in the service's own terms, and how its answer is written for the client.

    ``forms`` are the element types and encodings in which the answer has each row.
    """

    request: EmbeddingsRequest
    write: Callable[[Result], ResponseBody]
    forms: tuple[tuple[EmbedDtype, EncodingFormat], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedScores:
    """A request for scores in the service's own terms, and how its answer is written for the client.

    ``copies`` says how often the request's documents stand in the answer.
    """

    request: ScoreRequest
    write: Callable[[Scores], ResponseBody]
    copies: int = 0


Translate = Callable[[Json, Served], Translated]
"""From a parsed body to what it asks for; raises ``InvalidInput``."""


class Endpoint:
    """Answers requests that the middleware has admitted; the request's ticket is in its state."""

    def __init__(
        self, models: Models, limits: Limits, limiter: RateLimiter, metrics: FrontendMetrics
    ) -> None:
        self.models = models
        self._limits = limits
        self._limiter = limiter
        self._metrics = metrics
        self._fairness = LoopFairness()
        most = max(limits.request.inputs, limits.request.documents)
        self._brackets = max(BRACKETS, BRACKETS_AN_INPUT * most)

    async def embed(
        self, http: Request, translate: Translate, *, kinds: frozenset[OutputKind] = VECTORS
    ) -> Response:
        """The answer in the form that ``translate`` knows; errors are raised, for the route's own shape.

        Raises ``UnsupportedRoute`` unless the output of the model that is asked for is of ``kinds``.
        """
        self.check_route(http, kinds)
        deadline = self.deadline()
        raw = await self._body(http)
        async with self._fairness.turn():
            with tracing.span("parse"):
                parsed = self._parsed(http, raw)
                served = self.choose(http, asked_model(parsed), kinds)
                translated = translate(parsed, served.served)
        request = translated.request
        self.check_model(request, served)
        # As far as it is known before images are fetched and texts are tokenised.
        self._check_size(served, translated, len(request.inputs) * served.served.output.rows(1))
        request_id = identify(http, request)
        note(inputs=len(request.inputs), images=sum(len(entry.images) for entry in request.inputs))

        async def answer() -> Result:
            call = Call(
                request_id=request_id, deadline=deadline, client=client(http), priority=request.priority
            )
            work = await served.pipeline.prepare(request, call)
            if work.good:
                self._pay(http, work.cost, self._size(served, translated, work.cost))
            return await served.pipeline.embed(work, call)

        result = await until_disconnect(http, answer())
        note(
            tokens=result.usage.total_tokens,
            cached_tokens=result.usage.cached_tokens,
            failed_inputs=len(result.errors) or None,
            **result.timings.spent(),
        )
        body = await self._written(served, translated, result)
        return _response(http, body, request_id, result.timings)

    async def _written(self, served: ServedModel, translated: Translated, result: Result) -> ResponseBody:
        tokens = served.served.output.kind is OutputKind.TOKENS
        seconds = served.metrics.format_seconds
        if result.rows.values.nbytes < (_LARGE_BYTES if tokens else _LARGE_VECTORS_BYTES):
            async with self._fairness.turn():
                with seconds.time(), tracing.span("format"):
                    return translated.write(result)
        # The other requests of this process go on between the blocks of the rows.
        with seconds.time(), tracing.span("format"):
            return await asyncio.to_thread(translated.write, result)

    async def score(
        self,
        http: Request,
        translate: Callable[[Json, Served], TranslatedScores],
        *,
        kinds: frozenset[OutputKind] = ALL_KINDS,
        name: str | None = None,
    ) -> Response:
        """As ``embed``, for scores; ``name`` is the model's where the path has it."""
        self.check_route(http, kinds)
        if name is not None:
            self.models.find(name)
        deadline = self.deadline()
        raw = await self._body(http)
        async with self._fairness.turn():
            with tracing.span("parse"):
                parsed = self._parsed(http, raw)
                asked = asked_model(parsed) if name is None else name
                served = self.choose(http, asked, kinds, first=OutputKind.SCORE)
                translated = translate(parsed, served.served)
        request = translated.request
        self.check_model(request, served)
        request_id = identify(http, request)
        documents = len(request.documents)
        images = sum(len(entry.images) for entry in (*request.queries, *request.documents))
        note(inputs=len(request.queries) + documents, pairs=documents, images=images)
        written = _SCORE_BYTES * documents + translated.copies * len(raw)

        async def answer() -> Scores:
            call = Call(
                request_id=request_id, deadline=deadline, client=client(http), priority=request.priority
            )
            work = await served.pipeline.prepare_scores(request, call)
            self._pay(http, work.cost, self._score_size(served, request, written, work.cost))
            return await served.pipeline.score(work, call)

        scores = await until_disconnect(http, answer())
        note(
            tokens=scores.usage.total_tokens,
            cached_tokens=scores.usage.cached_tokens,
            **scores.timings.spent(),
        )
        async with self._fairness.turn():
            with served.metrics.format_seconds.time(), tracing.span("format"):
                body = translated.write(scores)
        return _response(http, body, request_id, scores.timings)

    def choose(
        self,
        http: Request,
        asked: str | None,
        kinds: frozenset[OutputKind] = ALL_KINDS,
        *,
        first: OutputKind | None = None,
    ) -> ServedModel:
        """The model that a request means, which the request now counts for.

        Without a name the only one whose output is of ``kinds``; of several the only one of kind ``first``:
        an embedding model answers routes for scores, too, but not beside a reranker. Raises
        ``ModelNotFound``, ``Unavailable`` for a model that is not there yet, ``UnsupportedRoute``,
        ``InvalidInput`` where the name is missing, and ``Overloaded`` when that model has too much to do.
        """
        models = self.models
        if len(models.served) == 1 and not models.waiting:
            # A name is checked once the body has been read by the client's own rules.
            served = models.served[0]
            self.check_kind(http, served, kinds)
        elif asked is not None and asked != _UNSPECIFIED:
            found = models.by_name.get(asked)
            served = models.find(split_model(asked, models.names)[0]) if found is None else found
            self.check_kind(http, served, kinds)
        else:
            served = self._only(http, kinds, first)
        state = http.scope["state"]
        state["model"] = served.served.model
        note(model=served.served.model)
        ticket: Ticket | None = state.get("ticket")
        if ticket is not None:
            ticket.enter(served.room)
        return served

    def _only(self, http: Request, kinds: frozenset[OutputKind], first: OutputKind | None) -> ServedModel:
        models = self.models
        able = [model for model in models if model.served.output.kind in kinds]
        if len(able) > 1 and first is not None:
            made_for = [model for model in able if model.served.output.kind is first]
            able = made_for if len(made_for) == 1 else able
        if len(able) == 1:
            return able[0]
        if able:
            names = ", ".join(repr(model.served.model) for model in able)
            raise InvalidInput(
                f"model: several models answer {http.scope['path']}, {names}: name one of them", param="model"
            )
        for name in models.waiting:
            # Raises why.
            models.find(name)
        self.check_route(http, kinds)
        raise ModelNotFound("no model is served here", param="model")

    def check_route(self, http: Request, kinds: frozenset[OutputKind]) -> None:
        """Raises ``UnsupportedRoute`` where no model's output is one that the route answers."""
        models = self.models
        if models.waiting:
            return
        for model in models.served:
            if model.served.output.kind in kinds:
                return
        for model in models.served:
            self.check_kind(http, model, kinds)

    @staticmethod
    def check_kind(http: Request, model: ServedModel, kinds: frozenset[OutputKind]) -> None:
        """Raises ``UnsupportedRoute`` unless the model's output is one that the route answers."""
        kind = model.served.output.kind
        if kind not in kinds:
            raise UnsupportedRoute(
                f"{http.scope['path']} answers models whose output is {_listed(kinds)}, and "
                f"{model.served.model!r} has {kind.value} as its output"
            )

    def deadline(self) -> Deadline:
        """For a request that has just come."""
        return Deadline.after(self._limits.timeout_seconds)

    async def json(self, http: Request) -> Json:
        """The request's parsed body; it may be asked for again."""
        raw = http.scope["state"]["body"] = await self._body(http)
        return self._parsed(http, raw)

    def _parsed(self, http: Request, raw: bytes) -> Json:
        kind = (header(http, b"content-type") or b"").decode("latin-1")
        return read_json(raw, kind, brackets=self._brackets)

    @staticmethod
    def check_model(request: EmbeddingsRequest | ScoreRequest, model: ServedModel) -> None:
        """Raises ``ModelNotFound`` for a model that is not served here."""
        asked, served = request.model, model.served
        if asked is not None and asked not in served.names and asked != _UNSPECIFIED:
            served.check(asked)

    def _check_size(
        self,
        served: ServedModel,
        translated: Translated,
        rows: int,
        bounds: npt.NDArray[np.int64] | None = None,
    ) -> int:
        """The bytes that rows take at most, in the answer or as they come.

        Raises ``ResponseTooLarge``, which names the first input over the limit. ``bounds`` says which rows
        are an input's; None before that is known.
        """
        inputs = translated.request.inputs
        own, asked = served.served.output.width, translated.request.dimensions
        width = own if asked is None else min(own, asked)
        row = sum(row_bytes(width, *form) for form in translated.forms)
        frame = sum(frame_bytes(encoding) for _, encoding in translated.forms)
        # From a worker they come as float32, whatever they are written as.
        nbytes = max(4 * own * rows, row * rows + frame * len(inputs))
        if nbytes > self._limits.max_response_bytes:
            if bounds is None:
                bounds = np.arange(len(inputs) + 1)
            written = row * bounds[1:] + frame * np.arange(1, len(bounds))
            over = np.maximum(4 * own * bounds[1:], written) > self._limits.max_response_bytes
            self._check_bytes(
                nbytes,
                f"the answer's {rows} rows of {width} values",
                "send fewer inputs, or ask for base64 or fewer dimensions",
                inputs[int(over.argmax())].param,
            )
        return nbytes

    def _check_bytes(self, nbytes: int, what: str, remedy: str, param: str | None = None) -> None:
        limit = self._limits.max_response_bytes
        if nbytes > limit:
            raise ResponseTooLarge(
                f"{what} may take {nbytes} bytes, over the limit of {limit} of an answer; {remedy}",
                param=param,
            )

    def _size(self, served: ServedModel, translated: Translated, cost: Cost) -> int:
        """As ``_check_size``, of what was prepared."""
        if cost.rows != len(translated.request.inputs):
            note(output_rows=cost.rows)
        return self._check_size(served, translated, cost.rows, cost.bounds)

    def _score_size(self, served: ServedModel, request: ScoreRequest, written: int, cost: Cost) -> int:
        """The bytes of rows or of ``written``, whichever are more; raises ``ResponseTooLarge``."""
        width, rows, param = served.served.output.width, cost.rows, None
        note(output_rows=rows)
        if 4 * width * rows > self._limits.max_response_bytes:
            first = int((4 * width * cost.bounds[1:] > self._limits.max_response_bytes).argmax())
            param = (*request.queries, *request.documents)[first].param
        nbytes = max(4 * width * rows, written)
        self._check_bytes(
            nbytes,
            f"{rows} rows of {width} values, or the answer with {len(request.documents)} scores,",
            "send fewer documents",
            param,
        )
        return nbytes

    def _pay(self, http: Request, cost: Cost, nbytes: int) -> None:
        """Charge the request for what it costs and for ``nbytes`` of its answer.

        Raises ``Overloaded`` where its model has no room for it, ``RateLimited`` where its key has none left.
        """
        note(tokens=cost.tokens, units=cost.units)
        ticket: Ticket = http.scope["state"]["ticket"]
        ticket.charge(cost.tokens, cost.units, nbytes)
        self._limiter.charge(key_name(http), cost.tokens)

    async def _body(self, http: Request) -> bytes:
        state = http.scope["state"]
        if (read := state.get("body")) is not None:
            # By a route that looks into the body to know what it is.
            return bytes(read)
        with tracing.span("read body") as span:
            raw = await read_body(
                http, limit=self._limits.max_body_bytes, timeout=self._limits.timeout_seconds
            )
            span.set_attribute("http.request.body.size", len(raw))
        return raw


def identify(http: Request, request: EmbeddingsRequest | ScoreRequest) -> str:
    """The request's id, which its body may set."""
    line: RequestLine = http.scope["state"]["line"]
    if request.request_id is not None:
        line.request_id = request.request_id
    return line.request_id


def client(http: Request) -> str:
    """The name of the API key that the request came with; empty where there are no keys."""
    return client_of(key_name(http))


def key_name(http: Request) -> str:
    """The name of the API key, also where there are none."""
    name: str = http.scope["state"].get("key_name", Authenticator.ANONYMOUS)
    return name


def asked_model(body: Json) -> str | None:
    """The model that a body names, in whichever client's form; what is no name is for that to refuse."""
    asked = body.get("model") if isinstance(body, dict) else None
    return asked if isinstance(asked, str) else None


def _listed(kinds: frozenset[OutputKind]) -> str:
    return " or ".join(kind.value for kind in OutputKind if kind in kinds)


def _response(http: Request, body: ResponseBody, request_id: str, timings: wire.Timings) -> Response:
    headers = body.headers | {"x-request-id": request_id}
    if header(http, b"x-tessera-timings") is not None:
        headers |= _timings(timings)
    return Response(body.content, media_type=body.media_type, headers=headers)


def _timings(timings: wire.Timings) -> dict[str, str]:
    """Milliseconds for each stage, for clients that send ``X-Tessera-Timings``."""
    return {
        f"x-tessera-{name.removesuffix('_ms')}-ms": f"{getattr(timings, name):.2f}"
        for name in timings.__struct_fields__
    }
