"""Leads one HTTP request from its body over a client's form and the pipeline to the answer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tessera import tracing, wire
from tessera.budgets import FairQueue
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
from tessera.frontend.api.formats import ResponseBody, frame_bytes, row_bytes
from tessera.frontend.api.routes import ApiRoute
from tessera.frontend.api.schema import Schema, operation
from tessera.frontend.api.values import BRACKETS, BRACKETS_AN_INPUT, Json, read_json
from tessera.frontend.block import Block
from tessera.frontend.exchange import Exchange, exchange_of
from tessera.frontend.request import (
    AnyRequest,
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
from tessera.logs import note
from tessera.models.base import Output, OutputKind
from tessera.turns import Threads, Turn

ALL_KINDS: Final = frozenset(OutputKind)
VECTORS: Final = frozenset((OutputKind.VECTOR,))
TOKEN_VECTORS: Final = frozenset((OutputKind.TOKENS,))
SPARSE: Final = frozenset((OutputKind.SPARSE,))
DENSE: Final = ALL_KINDS - SPARSE
# Of rows: writing an answer of more than these takes long enough for other requests to notice, 1 ms. With two
# clients that ask for pages of 50 MB of JSON, one in a hundred calls of /live takes 59 ms, and took 285.
_LARGE_BYTES: Final = 1 << 18
# Likewise of one vector for each input: 512 of 2048 numbers take 35 ms as JSON.
_LARGE_VECTORS_BYTES: Final = 1 << 22
# Of a weight in JSON at most: an id, a number and the token's text.
_WEIGHT_BYTES: Final = 96
# What a score and its index take in any client's JSON: 64 each, and some answers have them twice.
_SCORE_BYTES: Final = 128
# What Infinity's client sends as the model where it is given none.
_UNSPECIFIED: Final = "default/not-specified"

LARGE_BODY_BYTES: Final = 1 << 20
"""Bodies beyond this are parsed on a thread: a megabyte of token ids takes 50 ms."""


async def read_body(request: Request, limit: int, timeout: float) -> bytes:
    """Read the whole body, of at most ``limit`` bytes and within ``timeout`` seconds.

    A compressed body is refused: how large it becomes is known only after it has been decompressed.
    """
    exchange = exchange_of(request.scope)
    if exchange.headers.get(b"content-encoding", b"").strip().lower() not in (b"", b"identity"):
        raise UnsupportedMedia("the body must be sent as it is, without a Content-Encoding")
    if request.scope["state"].get("whole", False):
        # Most bodies come with their heads, and need no clock and no account.
        body, _ = await _part(request)
    else:
        body = await _arriving(request, exchange, limit, timeout)
    if len(body) > limit:
        raise _too_large(limit)
    exchange.body_bytes = len(body)
    return body


async def _part(request: Request) -> tuple[bytes, bool]:
    """Read what has come of a body, and whether there is more."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise RequestCancelled("the client went away while it was sending")
    return message.get("body", b""), message.get("more_body", False)


async def _arriving(request: Request, exchange: Exchange, limit: int, timeout: float) -> bytes:
    """Read a body that is still to come; its exchange holds its bytes, as announced or as they come.

    The announced length is refused before a byte is read, and what arrives is counted as well.
    """
    announced = exchange.body_bytes
    if announced is not None and announced > limit:
        raise _too_large(limit)
    exchange.hold(announced or 0)
    body, more = Block(announced, limit), True
    try:
        async with asyncio.timeout(timeout):
            while more and body.nbytes <= limit:
                part, more = await _part(request)
                if announced is None:
                    exchange.hold(len(part))
                body.add(part)
    except BaseException as error:
        body.drop()
        if isinstance(error, TimeoutError):
            raise RequestTimeout(f"the request body did not arrive within {timeout:.0f} s") from error
        raise
    return body.take()


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than the {limit} bytes that a request may have")


# Pieces of work in one round of the event loop, at most, and the time after which no other begins in it. A
# short request is read in 30 µs: with a round of its own for each, a round costs more than the piece.
_PIECES: Final = 8
_ROUND_SECONDS: Final = 1e-3


T = TypeVar("T")


class LoopTurns:
    """Runs functions on the event loop by turns, and lets it look at the network between them.

    Reading a request or writing an answer takes from 30 µs to several milliseconds. When hundreds are ready
    together, a client that comes then, to be refused or to ask for ``/health``, would wait for all of them.
    Another key's request does not wait for them either. Owned by one event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: FairQueue[Turn] = FairQueue()
        # Pieces that have begun, or may begin, in this round, and the seconds that they took.
        self._begun = 0
        self._spent = 0.0
        self._round_ends = False

    async def run(self, work: Callable[[], T], client: str = "") -> T:
        """Return the result of ``work``."""
        if self._queue or self._begun >= _PIECES or self._spent >= _ROUND_SECONDS:
            await self._wait(client)
        else:
            self._begun += 1
        started = time.perf_counter()
        try:
            return work()
        finally:
            self._spent += time.perf_counter() - started
            if not self._round_ends:
                self._end_round()

    async def _wait(self, client: str) -> None:
        turn = Turn(client, 1, 0, self._loop.create_future())
        self._queue.push(turn)
        try:
            await turn.granted
        except asyncio.CancelledError:
            # Else it had been given a turn, which nobody takes.
            if turn.in_queue:
                self._queue.remove(turn)
            raise

    def _end_round(self) -> None:
        self._round_ends = True
        # In the loop's next round, not in this one.
        self._loop.call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self._round_ends = False
        # As many as would take their time if they were like the last ones.
        seconds = self._spent / max(1, self._begun)
        self._begun, self._spent = 0, 0.0
        while self._queue and self._begun < _PIECES and self._begun * seconds < _ROUND_SECONDS:
            turn = self._queue.pop()
            if not turn.granted.done():
                turn.granted.set_result(None)
                self._begun += 1
        if self._begun:
            self._end_round()


N = TypeVar("N", int, npt.NDArray[np.int64])


class Translated(msgspec.Struct, frozen=True, kw_only=True):
    """Holds a request for vectors in the service's own terms, and how its answer is written.

    ``forms`` are the element types and encodings in which the answer has each row, where they are not the
    request's own.
    """

    request: EmbeddingsRequest
    write: Callable[[Result], ResponseBody]
    forms: tuple[tuple[EmbedDtype, EncodingFormat], ...] = ()

    async def run(self, served: ServedModel, exchange: Exchange, call: Call, limits: Limits) -> Result:
        """Prepare the request, pay for it and run it; raises ``ResponseTooLarge``, early for many inputs."""
        inputs = self.request.inputs
        if len(inputs) > 1:
            self._size(served.served, limits.max_response_bytes)
        note(inputs=len(inputs), images=sum([len(entry.images) for entry in inputs]))
        if self.request.outputs:
            note(outputs=",".join(self.request.outputs))
        work = await served.pipeline.prepare(self.request, call)
        cost = work.cost
        if work.good:
            if cost.rows != len(inputs):
                note(output_rows=cost.rows)
            nbytes = self._size(served.served, limits.max_response_bytes, cost.bounds)
            exchange.pay(cost.tokens, cost.units, nbytes)
        result = await served.pipeline.embed(work, call)
        note(failed_inputs=len(result.errors) or None)
        return result

    def _size(
        self, served: Served, limit: int, bounds: tuple[npt.NDArray[np.int64], ...] | None = None
    ) -> int:
        """Return the bytes that rows take at most, in the answer or as they come; ``limit`` are allowed.

        Raises ``ResponseTooLarge``, which names the first input over the limit. ``bounds`` says which rows
        are an input's, of each output; None before that is known.
        """
        request, inputs = self.request, len(self.request.inputs)
        outputs = served.asked(request.outputs) if request.outputs else (served.output,)
        rows = [int(ends[-1]) for ends in bounds] if bounds else [inputs] * len(outputs)
        nbytes = max(self._bytes(outputs, inputs, rows))
        if nbytes > limit:
            ends = np.arange(inputs + 1)
            taken = np.maximum(*self._bytes(outputs, ends, bounds or [ends] * len(outputs)))
            raise self._refusal(nbytes, limit, outputs, rows, int((taken[1:] > limit).argmax()))
        return nbytes

    def _refusal(
        self, nbytes: int, limit: int, outputs: Sequence[Output], rows: Sequence[int], first: int
    ) -> ResponseTooLarge:
        many = [f"{count} rows of {output.width} values" for output, count in zip(outputs, rows, strict=True)]
        remedy = "send fewer inputs, or ask for base64 or fewer dimensions"
        subject = "the answer's " + " and ".join(many)
        return _too_large_answer(nbytes, limit, subject, remedy, self.request.inputs[first].param)

    def _bytes(self, outputs: Sequence[Output], inputs: N, rows: Sequence[N]) -> tuple[N, N]:
        """Return the bytes of so many inputs with so many rows of each output: as they come, and as written.

        From a worker they come as float32, whatever they are written as.
        """
        forms = self.forms or ((self.request.dtype, self.request.encoding_format),)
        came, written = 0 * inputs, sum([frame_bytes(encoding) for _, encoding in forms]) * inputs
        for output, count in zip(outputs, rows, strict=True):
            width = min(output.width, self.request.dimensions or output.width)
            row = sum([row_bytes(width, *form) for form in forms])
            came = came + 4 * output.width * count
            written = written + (_WEIGHT_BYTES if output.kind is OutputKind.SPARSE else row) * count
        return came, written


class TranslatedScores(msgspec.Struct, frozen=True, kw_only=True):
    """Holds a request for scores in the service's own terms, and how its answer is written.

    ``copies`` says how often the request's documents stand in the answer.
    """

    request: ScoreRequest
    write: Callable[[Scores], ResponseBody]
    copies: int = 0

    async def run(self, served: ServedModel, exchange: Exchange, call: Call, limits: Limits) -> Scores:
        """Prepare the request, pay for it and run it."""
        request = self.request
        inputs = (*request.queries, *request.documents)
        images = sum([len(entry.images) for entry in inputs])
        note(inputs=len(inputs), pairs=len(request.documents), images=images)
        work = await served.pipeline.prepare_scores(request, call)
        note(output_rows=work.cost.rows)
        nbytes = self._size(served.served.output.width, limits.max_response_bytes, work.cost, exchange)
        exchange.pay(work.cost.tokens, work.cost.units, nbytes)
        return await served.pipeline.score(work, call)

    def _size(self, width: int, limit: int, cost: Cost, exchange: Exchange) -> int:
        """Return the bytes of rows or of the answer, the larger; raises ``ResponseTooLarge``."""
        request, documents = self.request, len(self.request.documents)
        copied = self.copies * (exchange.body_bytes or 0)
        nbytes = max(4 * width * cost.rows, _SCORE_BYTES * documents + copied)
        if nbytes > limit:
            over = 4 * width * cost.bounds[0][1:] > limit
            first = (*request.queries, *request.documents)[int(over.argmax())]
            raise _too_large_answer(
                nbytes,
                limit,
                f"{cost.rows} rows of {width} values, or the answer with {documents} scores,",
                "send fewer documents",
                first.param if over.any() else None,
            )
        return nbytes


def _too_large_answer(
    nbytes: int, limit: int, subject: str, remedy: str, param: str | None
) -> ResponseTooLarge:
    return ResponseTooLarge(
        f"{subject} may take {nbytes} bytes, over the limit of {limit} of an answer; {remedy}", param=param
    )


class InPieces(Response):
    """Sends its pieces one after the other; none is kept once it is written."""

    def __init__(self, pieces: Sequence[bytes], *, media_type: str, headers: Mapping[str, str]) -> None:
        length = str(sum(map(len, pieces)))
        super().__init__(None, media_type=media_type, headers={**headers, "content-length": length})
        self._pieces = deque(pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as ASGI asks for it."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        while self._pieces:
            piece = self._pieces.popleft()
            await send({"type": "http.response.body", "body": piece, "more_body": bool(self._pieces)})


R = TypeVar("R", Result, Scores)


class Choice(NamedTuple):
    """Says which model answers: the one of this ``name``, or that the body names.

    Without a name it is the only model whose output is of ``kinds``; of several the only one of kind
    ``first``: an embedding model answers routes for scores, too, but not beside a reranker.
    """

    kinds: frozenset[OutputKind] = ALL_KINDS
    first: OutputKind | None = None
    name: str | None = None


_ANY: Final = Choice()


class Task(Protocol[R]):
    """Declares a request in the service's own terms: ``Translated`` or ``TranslatedScores``."""

    @property
    def request(self) -> AnyRequest: ...

    @property
    def write(self) -> Callable[[R], ResponseBody]: ...

    async def run(self, served: ServedModel, exchange: Exchange, call: Call, limits: Limits) -> R: ...


def _is_large(result: Result | Scores, output: Output) -> bool:
    """Return whether other requests would notice how long vectors take to write; scores are few numbers."""
    most = _LARGE_BYTES if output.kind is OutputKind.TOKENS else _LARGE_VECTORS_BYTES
    return isinstance(result, Result) and sum([rows.nbytes for rows in result.outputs.values()]) >= most


class Endpoint:
    """Answers requests that the middleware has admitted."""

    def __init__(
        self, models: Models, limits: Limits, turns: LoopTurns, threads: Threads, bodies: Threads
    ) -> None:
        """Read and write in ``turns``, large answers on ``threads`` and large bodies on ``bodies``."""
        self.models = models
        self._turns = turns
        self._threads = threads
        self._bodies = bodies
        self._limits = limits
        most = max(limits.request.inputs, limits.request.documents)
        self._brackets = max(BRACKETS, BRACKETS_AN_INPUT * most)

    def route(
        self,
        path: str,
        translate: Callable[[Json, Served], Task[R]],
        *,
        name: str,
        summary: str,
        kinds: frozenset[OutputKind] = VECTORS,
        first: OutputKind | None = None,
        **described: Schema,
    ) -> ApiRoute:
        """Return the route of what ``answer`` answers; it is ``described`` as in ``operation``."""

        async def answered(http: Request) -> Response:
            return await self.answer(http, translate, Choice(kinds, first))

        described = operation(kinds=kinds, **described)
        return ApiRoute(path, answered, name=name, summary=summary, described=described)

    async def answer(
        self, http: Request, translate: Callable[[Json, Served], Task[R]], choice: Choice
    ) -> Response:
        """Answer in the form that ``translate`` gives; errors are raised, for the route's own shape.

        A ``name`` in the path is the model's.
        """
        exchange = exchange_of(http.scope)
        self._check_route(exchange, choice.kinds)
        if (name := http.path_params.get("name")) is not None:
            self.models.find(name)
            choice = choice._replace(name=name)
        served, task = await self.read(http, translate, choice)
        call = self.call(exchange, task.request, served.served)
        result = await exchange.departure.during(task.run(served, exchange, call, self._limits))
        used = result.usage
        note(tokens=used.total_tokens, cached_tokens=used.cached_tokens, **result.timings.spent())
        body = await self._written(served, task, result, exchange)
        headers = body.headers | {"x-request-id": exchange.line.request_id}
        if b"x-tessera-timings" in exchange.headers:
            headers |= _timings(result.timings)
        if isinstance(body.content, tuple):
            return InPieces(body.content, media_type=body.media_type, headers=headers)
        return Response(body.content, media_type=body.media_type, headers=headers)

    async def read(
        self, http: Request, translate: Callable[[Json, Served], T], choice: Choice = _ANY
    ) -> tuple[ServedModel, T]:
        """Read, parse and translate a body, a large one beside the event loop; it is gone afterwards."""
        exchange = exchange_of(http.scope)
        if len(await self._body(http, exchange)) > LARGE_BODY_BYTES:
            return await self._read_large(exchange, translate, choice)

        def parse() -> tuple[ServedModel, T]:
            with tracing.span("parse"):
                parsed = self._parsed(exchange)
                exchange.body = None
                served = self.choose(exchange, parsed, choice)
                return served, translate(parsed, served.served)

        return await self._turns.run(parse, exchange.client)

    async def _read_large(
        self, exchange: Exchange, translate: Callable[[Json, Served], T], choice: Choice
    ) -> tuple[ServedModel, T]:
        def parse() -> Json:
            try:
                return self._parsed(exchange)
            finally:
                # Its texts and images go on to hold what it held.
                exchange.body = None

        with tracing.span("parse"):
            # Hundreds of thousands of values take time to be freed, too.
            parsed = [await self._aside(parse, exchange)]
            served = self.choose(exchange, parsed[0], choice)
            return served, await self._aside(lambda: translate(parsed.pop(), served.served), exchange)

    async def _aside(self, work: Callable[[], T], exchange: Exchange) -> T:
        """Return the result of work in proportion to a body, in the turn of the exchange's key."""
        return await exchange.departure.during(exchange.aside(self._bodies, work))

    async def _written(
        self, served: ServedModel, task: Task[R], result: R, exchange: Exchange
    ) -> ResponseBody:
        """Write an answer, a large one beside the event loop."""

        def write() -> ResponseBody:
            with served.metrics.format_seconds.time(), tracing.span("format"):
                return task.write(result)

        if not _is_large(result, served.served.output):
            return await self._turns.run(write, exchange.client)
        # The other requests of this process go on between the blocks of the rows.
        return await exchange.departure.during(exchange.aside(self._threads, write))

    def choose(self, exchange: Exchange, body: Json, choice: Choice) -> ServedModel:
        """Return the model that a request means, which the request now counts for.

        Raises ``ModelNotFound``, ``Unavailable`` for one that is not there yet, ``UnsupportedRoute``,
        ``InvalidInput`` where the name is missing, and ``Overloaded`` when that model has too much to do.
        """
        models = self.models
        if len(models.served) == 1 and not models.waiting:
            # A name is checked once the body has been read by the client's own rules.
            served = models.served[0]
        else:
            served = self._find(exchange, body, choice)
        if choice.kinds.isdisjoint(served.served.kinds):
            raise _unsupported(exchange, served, choice.kinds)
        exchange.model = served.served.model
        note(model=exchange.model)
        if exchange.ticket is not None:
            exchange.ticket.enter(served.room)
        return served

    def _find(self, exchange: Exchange, body: Json, choice: Choice) -> ServedModel:
        """Look one of several models up."""
        models, (kinds, first, asked) = self.models, choice
        if asked is None and isinstance(body, dict):
            # The client's form refuses what is no name.
            asked = body.get("model")
        if isinstance(asked, str) and asked != _UNSPECIFIED:
            return models.by_name.get(asked) or models.find(split_model(asked, models.names)[0])
        able = [model for model in models if not kinds.isdisjoint(model.served.kinds)]
        if len(able) > 1 and first is not None:
            made_for = [model for model in able if model.served.output.kind is first]
            able = made_for if len(made_for) == 1 else able
        if len(able) == 1:
            return able[0]
        if able:
            names = ", ".join(repr(model.served.model) for model in able)
            raise InvalidInput.at(
                "model", f"several models answer {exchange.path}, {names}: name one of them"
            )
        for name in models.waiting:
            # Raises why.
            models.find(name)
        self._check_route(exchange, kinds)
        raise ModelNotFound("no model is served here", param="model")

    def _check_route(self, exchange: Exchange, kinds: frozenset[OutputKind]) -> None:
        """Raise ``UnsupportedRoute`` where no model's output is one that the route answers."""
        models = self.models
        if models.waiting or any(not kinds.isdisjoint(model.served.kinds) for model in models.served):
            return
        if models.served:
            raise _unsupported(exchange, models.served[0], kinds)

    def call(self, exchange: Exchange, request: AnyRequest, served: Served) -> Call:
        """Return what all work for the request has in common; the body may set the request's id.

        Raises ``ModelNotFound`` for a model that is not served here.
        """
        asked = request.model
        if asked is not None and asked not in served.names and asked != _UNSPECIFIED:
            served.check(asked)
        if request.request_id is not None:
            exchange.line.request_id = request.request_id
        return Call(
            request_id=exchange.line.request_id,
            deadline=exchange.deadline,
            client=exchange.client,
            priority=request.priority,
            cache_salt=request.cache_salt,
            hold=exchange.hold_in_turn,
        )

    async def json(self, http: Request) -> Json:
        """Return the request's parsed body; it may be asked for again."""
        exchange = exchange_of(http.scope)
        if len(await self._body(http, exchange)) > LARGE_BODY_BYTES:
            return await self._aside(partial(self._parsed, exchange), exchange)
        return self._parsed(exchange)

    def _parsed(self, exchange: Exchange) -> Json:
        kind = exchange.headers.get(b"content-type", b"").decode("latin-1")
        return read_json(exchange.body or b"", kind, brackets=self._brackets)

    async def _body(self, http: Request, exchange: Exchange) -> bytes:
        if exchange.body is None:
            limits = self._limits
            with tracing.span("read body") as span:
                exchange.body = await read_body(http, limits.max_body_bytes, limits.timeout_seconds)
                span.set_attribute("http.request.body.size", len(exchange.body))
        return exchange.body


def _unsupported(exchange: Exchange, model: ServedModel, kinds: frozenset[OutputKind]) -> UnsupportedRoute:
    return UnsupportedRoute(
        f"{exchange.path} answers models whose output is {_listed(kinds)}, and "
        f"{model.served.model!r} has {_listed(model.served.kinds)} as its output"
    )


def _listed(kinds: frozenset[OutputKind]) -> str:
    return " or ".join(kind.value for kind in OutputKind if kind in kinds)


def _timings(timings: wire.Timings) -> dict[str, str]:
    """Return milliseconds for each stage, for clients that send ``X-Tessera-Timings``."""
    return {
        f"x-tessera-{name.removesuffix('_ms')}-ms": f"{getattr(timings, name):.2f}"
        for name in timings.__struct_fields__
    }
