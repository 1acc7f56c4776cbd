"""Sends items to embed workers, each to the one it suits, and gathers their rows, with retries elsewhere."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import numpy as np
from blake3 import blake3

from tessera import wire
from tessera.budgets import RetryBudget
from tessera.errors import (
    DeadlineExceeded,
    EngineDead,
    HandOffError,
    ProtocolError,
    TesseraError,
    Unavailable,
)
from tessera.frontend.media.loader import Hold, unbounded
from tessera.frontend.metrics import ModelMetrics
from tessera.logs import count as count_on_line
from tessera.models.base import SCORES, Output, Outputs
from tessera.rows import Rows
from tessera.rpc import Loads, Peers
from tessera.tasks import Deadline, run_all
from tessera.transport.lending import Lender

log = logging.getLogger(__name__)

# The worker that takes over may go away, too.
_RETRIES: Final = 2

# One message carries at most this much image data and brings at most this many bytes of rows, so that no
# reply is longer than a message may be.
_MAX_MESSAGE_BYTES: Final = 48 << 20
# Rows that a worker on this host writes to memory of this process; fewer come in the reply, which then is a
# single message.
_LANDED_BYTES: Final = 1 << 20
# Of images that items do not have in common it carries one, or so much: a request with many large images is
# spread over several messages, which workers can begin one by one. A message is written, and handed to the
# runtime, in one go: to write 48 MiB of images took the loop 60 ms.
_MAX_IMAGE_BYTES: Final = 8 << 20


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What all work for one request has in common: who asks, until when, and for which rows.

    ``client`` names the API key, empty where there are none; a smaller ``priority`` is more urgent. What is
    kept of the request is for others with the same ``cache_salt``. ``outputs`` names them. With ``queries``,
    whose rows are as in ``wire.EmbedRequest``, an item becomes one number: how well its rows match those of
    its query. ``hold`` waits for room for bytes that are read for the request, before they are.
    """

    request_id: str
    deadline: Deadline
    client: str = ""
    priority: int = 0
    cache_salt: str = ""
    outputs: tuple[str, ...] = ()
    queries: Sequence[bytes] = ()
    hold: Hold = unbounded

    def outputs_of(self, outputs: Outputs) -> tuple[Output, ...]:
        """Return those of a model's outputs that an item becomes."""
        return (SCORES,) if self.queries else outputs.of(self.outputs)

    def message(self, items: Sequence[wire.Item], left: float) -> wire.EmbedRequest:
        """Ask a worker for the items' rows, with ``left`` seconds until the deadline."""
        return wire.EmbedRequest(
            request_id=self.request_id,
            items=tuple(items),
            timeout_ms=max(1, int(left * 1e3)),
            priority=self.priority,
            client=self.client,
            queries=tuple(self.queries),
            outputs=self.outputs,
        )


@dataclass(frozen=True, slots=True)
class Salt:
    """What the keys of caches have of a request beside what is cached: with ``by_key`` its client, too.

    Otherwise an answer's time and its ``cached_tokens`` tell whether somebody else has sent the same.
    """

    by_key: bool = False

    def __call__(self, call: Call) -> bytes:
        """Return the salt, empty where entries are everybody's."""
        if not self.by_key and not call.cache_salt:
            return b""
        client = call.client if self.by_key else ""
        return blake3(f"{len(client)} {client} {call.cache_salt}".encode("utf-8", "surrogatepass")).digest()


NO_SALT: Final = Salt()
NO_LENDER: Final = Lender("", capacity=0)

_NO_TIMINGS: Final = wire.Timings()


class Answer(msgspec.Struct):
    """What came back for items, in their order: rows as the family gives them, or errors by index.

    The rows of a failed item are zeros. The arrays may be a reply's own, which are read-only.
    """

    rows: Rows
    cached_tokens: list[int]
    errors: dict[int, TesseraError] = {}
    timings: wire.Timings = _NO_TIMINGS

    @classmethod
    def empty(cls, items: Sequence[wire.Item], output: Output, *others: Output) -> Answer:
        sizes = [item.chunk_count if item.chunks else item.token_count for item in items]
        rows = [Rows.zeros(each.bounds(sizes), each.width) for each in (output, *others)]
        return cls(Rows.together(rows), [0] * len(items))

    def put(self, items: Sequence[int], reply: wire.EmbedReply) -> None:
        """Take in what was answered for these items, whose numbers of rows have been checked."""
        self.timings = reply.timings if self.timings is _NO_TIMINGS else self.timings.merge(reply.timings)
        if len(items) == len(self.cached_tokens) and not reply.failures:
            # All there is, in its order.
            self.rows = _received(reply, self.rows)
            self.cached_tokens = list(reply.cached_tokens)
        else:
            self._put_some(items, reply)

    def _put_some(self, items: Sequence[int], reply: wire.EmbedReply) -> None:
        if good := [index for position, index in enumerate(items) if position not in reply.failures]:
            self.rows = self.rows.put(good, _received(reply, self.rows))
        for position, index in enumerate(items):
            self.cached_tokens[index] = reply.cached_tokens[position]
        for position, failure in reply.failures.items():
            self.errors[items[position]] = failure.error()


def _received(reply: wire.EmbedReply, like: Rows) -> Rows:
    """Return a reply's rows; their bounds are those of ``like``, and true where it has all of its items."""
    outputs = [
        Rows(
            np.frombuffer(own.rows, "<f4").reshape(-1, own.width),
            rows.bounds,
            np.frombuffer(own.norms, "<f4"),
            np.frombuffer(own.indices, "<i4") if own.indices else None,
        )
        for own, rows in zip(reply.outputs, like.each(), strict=True)
    ]
    return Rows.together(outputs)


class Embedder(Protocol):
    """Turns items into output rows: the dispatcher, or the result cache in front of it."""

    async def embed(self, items: Sequence[wire.Item], call: Call) -> Answer: ...


# How far a worker may be above the mean load before an image goes to the next in its ranking, and the
# tokens that are always allowed: with little load the mean says nothing, and leaving a cache costs an
# encode.
LOAD_FACTOR = 1.25
LOAD_SLACK = 16_384


class Router:
    """Picks by what this frontend has in flight: ``loads``, counted in tokens.

    Text goes to the least loaded worker. An image goes to the worker that rendezvous hashing ranks first
    for it (Thaler and Ravishankar, 1998), so that the workers' caches together hold each image once; when
    that worker is overloaded the next in the ranking takes it (bounded loads: Mirrokni, Thorup and
    Zadimoghaddam, 2018). A worker that joins or leaves moves only the images that hash to it.
    """

    def __init__(self, *, slack: int = LOAD_SLACK) -> None:
        self._slack = slack
        self.loads = Loads()

    def pick_image(self, digest: bytes, instances: Collection[int]) -> int:
        """Return the worker of an image; ``instances`` must not be empty."""
        bound = LOAD_FACTOR * sum(self.loads[instance] for instance in instances) / len(instances)
        ranking = sorted(instances, key=lambda instance: _weight(digest, instance), reverse=True)
        for instance in ranking:
            if self.loads[instance] <= bound + self._slack:
                return instance
        return ranking[0]


def _weight(digest: bytes, instance: int) -> bytes:
    return hashlib.blake2b(digest, digest_size=8, key=instance.to_bytes(8, "little", signed=False)).digest()


# An image, or the number of a query.
_Part = wire.Same | int
_NO_PARTS: Final[Mapping[_Part, int]] = {}


class _Share(msgspec.Struct):
    """The items of a request that go to one worker in one message, by index.

    ``nbytes`` are those of their rows. ``parts`` are what travels once for all of them, images and queries,
    of ``part_bytes``. ``lent`` says that some of their rows are not in the message.
    """

    instance: int
    indices: list[int] = []
    tokens: int = 0
    nbytes: int = 0
    part_bytes: int = 0
    parts: set[_Part] = set()
    lent: bool = False

    def is_full_for(self, parts: Mapping[_Part, int], more: int) -> bool:
        """Whether an item of these parts, ``more`` bytes in all, has none of them here, and is too much."""
        full = bool(self.parts) and self.part_bytes + more > _MAX_IMAGE_BYTES
        return full and self.parts.isdisjoint(parts)


class _Request(msgspec.Struct, frozen=True):
    """What the shares of one request have in common; each writes its items' part of ``answer``.

    ``outputs`` are what an item becomes, ``counts`` the numbers of its rows of each.
    ``gone`` are the instances that went away meanwhile.
    """

    items: Sequence[wire.Item]
    call: Call
    outputs: tuple[Output, ...]
    answer: Answer
    counts: Sequence[Sequence[int]]
    gone: set[int] = set()

    def nbytes(self, index: int) -> int:
        """Return the bytes of an item's values."""
        sizes = zip(self.outputs, self.counts, strict=True)
        return sum([4 * output.width * counts[index] for output, counts in sizes])

    def parts(self, item: wire.Item) -> dict[_Part, int]:
        """Return the images and the query of an item, and their bytes."""
        parts: dict[_Part, int] = {image.same: image.size for image in item.images}
        if self.call.queries:
            parts[item.query] = len(self.call.queries[item.query])
        return parts


class Dispatcher:
    """Shares a request's items out among workers, calls them at once, and gathers what they answer."""

    def __init__(
        self,
        peers: Peers,
        router: Router,
        metrics: ModelMetrics,
        outputs: Outputs,
        *,
        lender: Lender = NO_LENDER,
        wait_seconds: float = 30.0,
    ) -> None:
        self._peers = peers
        self._router = router
        self._metrics = metrics
        self._outputs = outputs
        self._lender = lender
        self._wait_seconds = wait_seconds
        self._budget = RetryBudget()

    async def embed(self, items: Sequence[wire.Item], call: Call) -> Answer:
        """Answer every item with its rows or an error; never raises for one item alone.

        Items whose worker went away are sent again, to another worker, as far as the retry budget goes:
        embedding twice does no harm. When the last worker went away, they wait for the next.
        """
        outputs = call.outputs_of(self._outputs)
        answer = Answer.empty(items, *outputs)
        counts = [rows.counts.tolist() for rows in answer.rows.each()]
        request = _Request(items, call, outputs, answer, counts)
        self._budget.called()
        await self._send(request, await self._share_out(request, range(len(items))))
        if answer.errors:
            await self._send_again(request)
        return answer

    async def _send_again(self, request: _Request) -> None:
        answer, deaths = request.answer, Counter[int]()
        for _ in range(_RETRIES):
            indices = [index for index, error in sorted(answer.errors.items()) if _is_retryable(error)]
            # One of these items may have broken the engine: each may break a second one, and no third.
            deaths.update(index for index in indices if isinstance(answer.errors[index], EngineDead))
            indices = [index for index in indices if deaths[index] < 2]
            if not indices:
                return
            if not self._budget.take():
                self._metrics.retries_denied.inc()
                return
            self._metrics.retries.inc(len(indices))
            count_on_line("retried_inputs", len(indices))
            log.debug("%d items are sent again: %s", len(indices), answer.errors[indices[0]])
            try:
                shares = await self._share_out(request, indices)
            except TesseraError as error:
                # Those that have their answers keep them.
                answer.errors.update(dict.fromkeys(indices, error.kept()))
                return
            for index in indices:
                del answer.errors[index]
            await self._send(request, shares)

    async def _share_out(self, request: _Request, indices: Sequence[int]) -> list[_Share]:
        left = request.call.deadline.left()
        if not self._peers.ready:
            await self._peers.wait_back(self._wait_seconds, left)
        ready = self._peers.ready.keys() - request.gone or self._peers.ready.keys()
        if not ready:
            raise Unavailable("no embed worker is available", retry_after=1.0)
        open_: dict[int, _Share] = {}
        shares: list[_Share] = []
        for index in indices:
            item = request.items[index]
            parts = request.parts(item) if item.images or request.call.queries else _NO_PARTS
            if item.images:
                # A query's images come first and are the same in all its pairs.
                instance = self._router.pick_image(item.images[-1].digest, ready)
            else:
                instance = self._router.loads.least(ready)
            # Counted at once, so that the items of one large request spread over the workers too.
            self._router.loads.add(instance, item.token_count)
            share = open_.get(instance)
            nbytes = request.nbytes(index)
            more = sum([size for part, size in parts.items() if share is None or part not in share.parts])
            full = share is None or share.nbytes + share.part_bytes + nbytes + more > _MAX_MESSAGE_BYTES
            if share is None or full or (more and share.is_full_for(parts, more)):
                share = open_[instance] = _Share(instance)
                shares.append(share)
                more = sum(parts.values())
            share.indices.append(index)
            share.tokens += item.token_count
            share.nbytes += nbytes
            share.part_bytes += more
            share.parts.update(parts)
        return shares

    async def _send(self, request: _Request, shares: Sequence[_Share]) -> None:
        try:
            await run_all([self._call(request, share) for share in shares])
        finally:
            for share in shares:
                self._router.loads.add(share.instance, -share.tokens)

    async def _call(self, request: _Request, share: _Share) -> None:
        items: Sequence[wire.Item] = [request.items[index] for index in share.indices]
        call, answer = request.call, request.answer
        with ExitStack() as loans:
            if share.parts:
                items, call = self._sent_once(items, call, share, loans)
            try:
                left = call.deadline.left()
                message = call.message(items, left)
                if share.nbytes < _LANDED_BYTES or len(request.outputs) > 1:
                    reply = await self._peers.call(share.instance, message, timeout=left)
                else:
                    reply = await self._landed(share, message, left, loans)
                answer.put(share.indices, _checked(reply, share, request))
            except TesseraError as error:
                self._failed(request, share, error)
        if answer.errors:
            self._look_at_errors(request, share)

    async def _landed(
        self, share: _Share, message: wire.EmbedRequest, left: float, loans: ExitStack
    ) -> wire.Reply:
        """Call a worker, which writes the rows to memory of this process if it can."""
        worker = self._peers.ready.get(share.instance)
        landing = self._lender.landing(share.nbytes) if self._lender.reaches(worker) else None
        if landing is not None:
            loans.callback(landing.close)
            message = msgspec.structs.replace(message, into=landing.info)
        reply = await self._peers.call(share.instance, message, timeout=left)
        if landing is None or not isinstance(reply, wire.EmbedReply) or len(reply.outputs) != 1:
            return reply
        (output,) = reply.outputs
        if output.rows:
            self._lender.unreachable(worker)
            return reply
        rows = landing.landed(len(output.norms) * output.width)
        return msgspec.structs.replace(reply, outputs=(msgspec.structs.replace(output, rows=rows),))

    def _failed(self, request: _Request, share: _Share, error: TesseraError) -> None:
        """Give all items of a share the error of their call."""
        if isinstance(error, DeadlineExceeded) and error.param is None:
            # Nobody there knows how long the whole request has.
            error = request.call.deadline.exceeded()
        request.answer.errors.update(dict.fromkeys(share.indices, error.kept()))
        if isinstance(error, Unavailable):
            request.gone.add(share.instance)
            self._peers.suspect(share.instance)

    def _look_at_errors(self, request: _Request, share: _Share) -> None:
        errors = [request.answer.errors.get(index) for index in share.indices]
        if any(map(_is_retryable, errors)):
            request.gone.add(share.instance)
        if share.lent and any(isinstance(error, HandOffError) for error in errors):
            self._lender.unreachable(self._peers.ready.get(share.instance))

    def _sent_once(
        self, items: Sequence[wire.Item], call: Call, share: _Share, loans: ExitStack
    ) -> tuple[Sequence[wire.Item], Call]:
        """Return the items with what several have in common in the first of them alone, and their queries."""
        if len(items) > 1:
            items = list(_without_repeats(items))
        images = [image for item in items for image in item.images]
        if any(isinstance(image, wire.Embeddings) and image.handle.data for image in images):
            share.lent = self._lender.reaches(self._peers.ready.get(share.instance))
        if share.lent:
            items = [
                msgspec.structs.replace(
                    item, images=tuple([self._lent(image, loans) for image in item.images])
                )
                for item in items
            ]
        if call.queries:
            numbers = {number: place for place, number in enumerate(sorted({item.query for item in items}))}
            call = msgspec.structs.replace(call, queries=[call.queries[number] for number in numbers])
            items = [msgspec.structs.replace(item, query=numbers[item.query]) for item in items]
        return items, call

    def _lent(self, rows: wire.Image | wire.Embeddings, loans: ExitStack) -> wire.Image | wire.Embeddings:
        """Lend a client's own rows until ``loans`` are closed, where there is room for them."""
        if isinstance(rows, wire.Image) or not rows.handle.data:
            return rows
        loan = self._lender.take(rows.handle.shape, rows.handle.dtype)
        if loan is None:
            return rows
        loans.callback(loan.close)
        return msgspec.structs.replace(rows, handle=loan.lease(rows.handle), slab=loan.info)


def _checked(reply: wire.Reply, share: _Share, request: _Request) -> wire.EmbedReply:
    """Raise ``ProtocolError`` unless there are as many rows for each item as it was to become."""
    worker = f"embed worker {share.instance:x}"
    if not isinstance(reply, wire.EmbedReply):
        raise ProtocolError(f"{worker} answered {type(reply).__name__}")
    items, failed = len(share.indices), reply.failures
    if failed and not 0 <= min(failed) <= max(failed) < items:
        raise ProtocolError(f"{worker} reports a failure of an item it was not sent")
    counts = request.counts
    if failed or items != len(counts[0]):
        counts = [
            [0 if position in failed else of_items[index] for position, index in enumerate(share.indices)]
            for of_items in counts
        ]
    if reply.counts != tuple(counts[0]) or len(reply.cached_tokens) != items:
        raise ProtocolError(f"{worker} sent rows of other items than it was asked for")
    if len(reply.outputs) != len(counts) and len(failed) < items:
        raise ProtocolError(f"{worker} sent the rows of {len(reply.outputs)} outputs, not of {len(counts)}")
    for output, expected, given in zip(request.outputs, counts, reply.outputs, strict=False):
        rows, width = sum(expected), output.width
        # Which of an output's rows hold something is the worker's to say, if it says it of all.
        sizes = (len(given.rows), len(given.norms), given.width, len(given.indices) or 4 * rows)
        if sizes != (4 * rows * width, 4 * rows, width, 4 * rows):
            raise ProtocolError(f"{worker} sent other rows than [{rows}, {width}]")
    return reply


def _without_repeats(items: Sequence[wire.Item]) -> Iterator[wire.Item]:
    """Give the items, with no data in images that one before has: a query's are in each of its pairs."""
    sent: set[_Part] = set()
    for item in items:
        images = tuple(_emptied(image) if image.same in sent else image for image in item.images)
        sent.update(image.same for image in images)
        yield item if images == item.images else msgspec.structs.replace(item, images=images)


def _emptied(image: wire.Image | wire.Embeddings) -> wire.Image | wire.Embeddings:
    if isinstance(image, wire.Image):
        return msgspec.structs.replace(image, data=b"")
    return msgspec.structs.replace(image, handle=msgspec.structs.replace(image.handle, data=b""))


def _is_retryable(error: TesseraError | None) -> bool:
    return isinstance(error, Unavailable | HandOffError)
