"""Sends items to embed workers and gathers their output rows, with retries elsewhere."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.errors import EngineDead, HandOffError, ProtocolError, TesseraError, Unavailable
from tessera.frontend.metrics import ModelMetrics
from tessera.frontend.serving.router import Router
from tessera.image_plan import ImagePlan
from tessera.logs import count as count_on_line
from tessera.models.base import SCORES, Output, RowKind
from tessera.rpc import Peers, RetryBudget
from tessera.tasks import Deadline, run_all
from tessera.transport.host import host_id
from tessera.transport.lending import Lender

log = logging.getLogger(__name__)

# The worker that takes over may go away, too.
_RETRIES = 2

# One call carries at most this much image data and brings at most this many bytes of rows, so that a request
# with many large images is spread over several calls that workers can begin one by one, and no reply is
# longer than a message may be.
_MAX_CALL_BYTES = 48 << 20


@dataclass(slots=True)
class Answer:
    """What came back for each item, in order: its rows of ``rows``, or an error.

    ``rows`` is float32 ``[rows, width]`` as the family gives them, ``norms`` float32 ``[rows]`` the lengths
    that those had which were scaled to unit length, and 1 elsewhere; both are zeros for failed items, and may
    be a reply's own, which is read-only. ``bounds``, int64 ``[items + 1]``, says which rows are an item's.
    """

    rows: npt.NDArray[np.float32]
    norms: npt.NDArray[np.float32]
    bounds: npt.NDArray[np.int64]
    errors: dict[int, TesseraError] = field(default_factory=dict)
    cached_tokens: list[int] = field(default_factory=list)
    timings: wire.Timings = field(default_factory=wire.Timings)

    @classmethod
    def empty(cls, items: Sequence[wire.Item], output: Output) -> Answer:
        bounds = row_bounds(output, [item.token_count for item in items])
        count = int(bounds[-1])
        return cls(
            np.zeros((count, output.width), np.float32),
            np.zeros(count, np.float32),
            bounds,
            cached_tokens=[0] * len(items),
        )

    def put(self, items: Sequence[int], reply: wire.EmbedReply) -> None:
        """Take in what was answered for these items, whose numbers of rows have been checked."""
        self.timings = self.timings.merge(reply.timings)
        if len(items) == len(self.cached_tokens) and not reply.failures:
            # All there is, in its order.
            self.rows = np.frombuffer(reply.rows, "<f4").reshape(-1, self.rows.shape[1])
            self.norms = np.frombuffer(reply.norms, "<f4")
            self.cached_tokens = list(reply.cached_tokens)
            return
        good = [index for position, index in enumerate(items) if position not in reply.failures]
        places = self.rows_of(good)
        self.rows[places] = np.frombuffer(reply.rows, "<f4").reshape(-1, self.rows.shape[1])
        self.norms[places] = np.frombuffer(reply.norms, "<f4")
        for position, index in enumerate(items):
            self.cached_tokens[index] = reply.cached_tokens[position]
        for position, failure in reply.failures.items():
            self.errors[items[position]] = failure.error()

    def rows_of(self, items: Sequence[int]) -> npt.NDArray[np.int64]:
        """The indices of these items' rows, one item after the other."""
        return indices_within(self.bounds, items)


def row_bounds(output: Output, tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """Which rows inputs of so many tokens become: int64 ``[inputs + 1]``."""
    rows = accumulate(map(output.rows, tokens), initial=0)
    return np.fromiter(rows, np.int64, len(tokens) + 1)


def indices_within(bounds: npt.NDArray[np.int64], items: Sequence[int]) -> npt.NDArray[np.int64]:
    """The indices of the rows of these items, whose bounds are among ``bounds``, one item after the other."""
    at = np.fromiter(items, np.int64, len(items))
    first = bounds[at]
    counts = bounds[at + 1] - first
    ends = np.cumsum(counts)
    if not len(ends):
        return ends
    return np.repeat(first - (ends - counts), counts) + np.arange(ends[-1])


class Embedder(Protocol):
    """Turns items into output rows: the dispatcher, or the result cache in front of it.

    ``rows`` says of what the rows are, see ``RowKind``. With ``queries``, whose rows are as in
    ``wire.EmbedRequest``, an item becomes one number: how well its rows match those of its query.
    """

    async def embed(
        self,
        items: Sequence[wire.Item],
        *,
        request_id: str,
        priority: int,
        client: str,
        deadline: Deadline,
        queries: Sequence[bytes] = (),
        rows: RowKind = RowKind.OUTPUT,
    ) -> Answer: ...


# After a worker on this host could not map what was lent to it, rows go into the messages for so long.
_NOT_LENT_SECONDS = 60.0


class RowLender:
    """Replaces rows in messages by handles to memory of this process, for workers on this host.

    Rows stay in the message for a worker on another host, or when ``capacity`` bytes are lent already.
    """

    def __init__(self, producer: str, *, capacity: int) -> None:
        self._lender = Lender(producer, capacity=capacity)
        self._paused_until = 0.0

    @property
    def lent(self) -> int:
        """Bytes that workers may be reading now."""
        return self._lender.lent

    @contextmanager
    def lending(
        self, items: Sequence[wire.Item], reader: wire.WorkerInfo | None
    ) -> Iterator[tuple[wire.Item, ...]]:
        """The items as they are to be sent; afterwards nothing is lent any more."""
        with ExitStack() as loans:
            if reader is None or reader.host != host_id() or time.monotonic() < self._paused_until:
                yield tuple(items)
            else:
                yield tuple(self._item(item, loans) for item in items)

    def unreadable(self, reader: wire.WorkerInfo | None) -> None:
        """A worker could not read what was lent to it."""
        if reader is not None and reader.host == host_id() and time.monotonic() >= self._paused_until:
            self._paused_until = time.monotonic() + _NOT_LENT_SECONDS
            log.warning("a worker on this host could not read lent rows; they go into messages for a while")

    def _item(self, item: wire.Item, loans: ExitStack) -> wire.Item:
        images = tuple(
            self._lent(image, loans) if isinstance(image, wire.Embeddings) and image.handle.data else image
            for image in item.images
        )
        return msgspec.structs.replace(item, images=images)

    def _lent(self, rows: wire.Embeddings, loans: ExitStack) -> wire.Embeddings:
        loan = self._lender.lend(rows.handle)
        if loan is None:
            return rows
        loans.callback(loan.close)
        return msgspec.structs.replace(rows, handle=loan.handle, slab=loan.info)


# An image, or the number of a query.
_Part = tuple[bytes, ImagePlan] | int


@dataclass(frozen=True, slots=True)
class _Call:
    instance: int
    indices: list[int]
    tokens: int


@dataclass(frozen=True, slots=True)
class _Request:
    """What the calls of one request share; each writes its items' part of ``answer``.

    ``output`` is what an item becomes. ``gone`` are the instances that went away meanwhile.
    """

    items: Sequence[wire.Item]
    queries: Sequence[bytes]
    rows: RowKind
    output: Output
    request_id: str
    priority: int
    client: str
    deadline: Deadline
    answer: Answer
    gone: set[int] = field(default_factory=set)

    def parts(self, item: wire.Item, sent: Collection[_Part] = ()) -> dict[_Part, int]:
        """What travels once for all items of a call that have it, images and a query, and its bytes.

        ``sent`` is what the call has already.
        """
        parts: dict[_Part, int] = {image.same: _nbytes(image) for image in item.images}
        if self.queries:
            parts[item.query] = len(self.queries[item.query])
        return {part: nbytes for part, nbytes in parts.items() if part not in sent}


class Dispatcher:
    """Groups a request's items by worker, calls the workers at once, and puts the answers in shared."""

    def __init__(
        self,
        peers: Peers,
        router: Router,
        metrics: ModelMetrics,
        output: Output,
        *,
        stages: Mapping[RowKind, Output] | None = None,
        lender: RowLender | None = None,
        wait_seconds: float = 30.0,
    ) -> None:
        self._peers = peers
        self._router = router
        self._metrics = metrics
        self._outputs = {RowKind.OUTPUT: output, **(stages or {})}
        self._lender = lender
        self._wait_seconds = wait_seconds
        self._budget = RetryBudget()

    async def embed(
        self,
        items: Sequence[wire.Item],
        *,
        request_id: str,
        priority: int = 0,
        client: str = "",
        deadline: Deadline,
        queries: Sequence[bytes] = (),
        rows: RowKind = RowKind.OUTPUT,
    ) -> Answer:
        """Every item is answered with its rows or an error; never raises for one item alone.

        Items whose worker went away are sent again, to another worker, as far as the retry budget goes:
        embedding twice does no harm. When the last worker went away, they wait for the next.
        """
        output = SCORES if queries else self._outputs[rows]
        answer = Answer.empty(items, output)
        request = _Request(items, queries, rows, output, request_id, priority, client, deadline, answer)
        deaths: Counter[int] = Counter()
        indices = list(range(len(items)))
        self._budget.called()
        calls = await self._plan(request, indices)
        for retries_left in reversed(range(_RETRIES + 1)):
            await self._call_all(request, calls)
            indices = [index for index in indices if _is_retryable(answer.errors.get(index))]
            # One of these items may have broken the engine: each may break a second one, and no third.
            deaths.update(index for index in indices if isinstance(answer.errors[index], EngineDead))
            indices = [index for index in indices if deaths[index] < 2]
            if not indices or not retries_left:
                break
            if not self._budget.take():
                self._metrics.retries_denied.inc()
                break
            self._metrics.retries.inc(len(indices))
            count_on_line("retried_inputs", len(indices))
            log.debug("%d items are sent again: %s", len(indices), answer.errors[indices[0]])
            try:
                calls = await self._plan(request, indices)
            except TesseraError as error:
                # Those that have their answers keep them.
                answer.errors.update(dict.fromkeys(indices, error))
                break
            for index in indices:
                del answer.errors[index]
        return answer

    async def _plan(self, request: _Request, indices: Sequence[int]) -> list[_Call]:
        left = request.deadline.left()
        if not self._peers.ready:
            await self._peers.wait_back(self._wait_seconds, left)
        ready = self._peers.ready.keys() - request.gone or self._peers.ready.keys()
        if not ready:
            raise Unavailable("no embed worker is available", retry_after=1.0)
        grouped: defaultdict[int, list[int]] = defaultdict(list)
        size: defaultdict[int, int] = defaultdict(int)
        tokens: defaultdict[int, int] = defaultdict(int)
        sent: defaultdict[int, set[_Part]] = defaultdict(set)
        calls: list[_Call] = []
        for index in indices:
            item = request.items[index]
            count = item.token_count
            if item.images:
                # A query's images come first and are the same in all its pairs.
                instance = self._router.pick_image(item.images[-1].digest, ready)
            else:
                instance = self._router.pick_text(ready)
            # Counted at once, so that the items of one large request spread over the workers too.
            self._router.started(instance, count)
            nbytes = 4 * request.output.width * request.output.rows(count)
            if item.images or request.queries:
                nbytes += sum(request.parts(item, sent[instance]).values())
            if grouped[instance] and size[instance] + nbytes > _MAX_CALL_BYTES:
                calls.append(_Call(instance, grouped.pop(instance), tokens.pop(instance)))
                size[instance] = 0
                sent[instance].clear()
            grouped[instance].append(index)
            size[instance] += nbytes
            if item.images or request.queries:
                sent[instance].update(request.parts(item))
            tokens[instance] += count
        calls += [_Call(instance, group, tokens[instance]) for instance, group in grouped.items()]
        return calls

    async def _call_all(self, request: _Request, calls: Sequence[_Call]) -> None:
        try:
            await run_all([self._call(call, request) for call in calls])
        finally:
            for call in calls:
                self._router.finished(call.instance, call.tokens)

    async def _call(self, call: _Call, request: _Request) -> None:
        items = tuple(request.items[index] for index in call.indices)
        if any(item.images for item in items):
            items = tuple(_without_repeats(items))
        if self._lender is None or not any(_has_rows(item) for item in items):
            await self._send(call, items, request)
            return
        with self._lender.lending(items, self._peers.ready.get(call.instance)) as lent:
            await self._send(call, lent, request)
        if any(isinstance(request.answer.errors.get(index), HandOffError) for index in call.indices):
            self._lender.unreadable(self._peers.ready.get(call.instance))

    async def _send(self, call: _Call, items: tuple[wire.Item, ...], request: _Request) -> None:
        queries: list[bytes] = []
        if request.queries:
            numbers = {number: place for place, number in enumerate(sorted({item.query for item in items}))}
            queries = [request.queries[number] for number in numbers]
            items = tuple(msgspec.structs.replace(item, query=numbers[item.query]) for item in items)
        message = wire.EmbedRequest(
            request_id=request.request_id,
            items=items,
            timeout_ms=max(1, int(request.deadline.left() * 1e3)),
            priority=request.priority,
            client=request.client,
            queries=tuple(queries),
            rows=request.rows.value,
        )
        answer = request.answer
        try:
            reply = await self._peers.call(call.instance, message, timeout=request.deadline.left())
            self._check(reply, call, request)
        except TesseraError as error:
            if isinstance(error, Unavailable):
                request.gone.add(call.instance)
                self._peers.suspect(call.instance)
            answer.errors.update(dict.fromkeys(call.indices, error))
            return
        assert isinstance(reply, wire.EmbedReply)
        answer.put(call.indices, reply)
        if any(_is_retryable(answer.errors[call.indices[position]]) for position in reply.failures):
            request.gone.add(call.instance)

    def _check(self, reply: wire.Reply, call: _Call, request: _Request) -> None:
        """Raise ``ProtocolError`` unless there are as many rows for each item as it was to become."""
        who, output = f"embed worker {call.instance:x}", request.output
        if not isinstance(reply, wire.EmbedReply):
            raise ProtocolError(f"{who} answered {type(reply).__name__}")
        if not all(0 <= position < len(call.indices) for position in reply.failures):
            raise ProtocolError(f"{who} reports a failure of an item it was not sent")
        expected = tuple(
            0 if position in reply.failures else output.rows(request.items[index].token_count)
            for position, index in enumerate(call.indices)
        )
        count = sum(expected)
        sizes = (len(reply.rows), len(reply.norms), reply.width, len(reply.cached_tokens), reply.counts)
        if sizes != (
            4 * count * output.width,
            4 * count,
            output.width,
            len(expected),
            expected,
        ):
            raise ProtocolError(f"{who} sent other rows than [{count}, {output.width}]")


def _has_rows(item: wire.Item) -> bool:
    return any(isinstance(image, wire.Embeddings) and image.handle.data for image in item.images)


def _without_repeats(items: Sequence[wire.Item]) -> Iterator[wire.Item]:
    """The items, where images have no data that are in one before: a query's are in each of its pairs."""
    sent: set[_Part] = set()
    for item in items:
        images = tuple(_emptied(image) if image.same in sent else image for image in item.images)
        sent.update(image.same for image in images)
        yield item if images == item.images else msgspec.structs.replace(item, images=images)


def _emptied(image: wire.Image | wire.Embeddings) -> wire.Image | wire.Embeddings:
    if isinstance(image, wire.Image):
        return msgspec.structs.replace(image, data=b"")
    return msgspec.structs.replace(image, handle=msgspec.structs.replace(image.handle, data=b""))


def _nbytes(image: wire.Image | wire.Embeddings) -> int:
    return len(image.data) if isinstance(image, wire.Image) else len(image.handle.data)


def _is_retryable(error: TesseraError | None) -> bool:
    return isinstance(error, Unavailable | HandOffError)
