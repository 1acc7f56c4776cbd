"""The line that a worker writes about each request that it has a part in."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial

from tessera import tracing, wire
from tessera.errors import Overloaded, RequestCancelled, RequestError, TesseraError, internal_error
from tessera.logs import Line, RequestLine, Value, is_sampled, note, serving

log = logging.getLogger("tessera.worker.access")

# The calls of one request reach a worker within moments of one another.
_LINGER_SECONDS = 1.0
# A client may give all its requests one id and never pause.
_MOST_SECONDS = 60.0

Work = wire.EmbedRequest | wire.EncodeRequest

Handler = Callable[[wire.Request], Awaitable[wire.Reply]]


@dataclass(slots=True, eq=False)
class Part:
    """What this instance has done for one request so far; times are of the monotonic clock."""

    line: RequestLine
    call: str
    began: float
    ended: float = 0.0
    ended_at: float = 0.0
    calls: int = 0
    running: int = 0
    sums: defaultdict[str, int] = field(default_factory=partial(defaultdict, int))
    timings: wire.Timings | None = None
    failure: wire.Failure | None = None
    fault: bool = False


class AccessLog:
    """Writes one line for each request, however many calls bring its inputs or images here.

    A line is written once no more calls have come for ``linger`` seconds, with the time at which the last of
    them was answered. Owned by one event loop.
    """

    def __init__(
        self, address: str, handler: Handler, *, linger: float = _LINGER_SECONDS, share: float = 1.0
    ) -> None:
        self._share = share
        self._address = address
        self._handler = handler
        self._linger = linger
        self._newest: dict[str, Part] = {}
        # In the order in which their last calls ended. One timer is for all of them.
        self._waiting: dict[Part, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def answer(self, message: wire.Request) -> Awaitable[wire.Reply]:
        """What the handler replies to a call; the call's part of the line and its span are recorded.

        Only calls that ask for work are. An error that is no ``TesseraError`` is written with its traceback;
        where a task runs the handler it is raised as an internal one. A future of the handler's is handed on.
        """
        if not isinstance(message, wire.EmbedRequest | wire.EncodeRequest):
            return self._handler(message)
        part = self.begin(message)
        try:
            with serving(part.line):
                # A span is left in the task that entered it.
                work = self._traced(message) if tracing.recording() else self._handler(message)
                reply = work if isinstance(work, asyncio.Future) else asyncio.ensure_future(_translated(work))
        except BaseException as error:
            self.end(part, message, error)
            raise
        reply.add_done_callback(partial(self._answered, part, message, work))
        return reply

    async def _traced(self, message: Work) -> wire.Reply:
        with tracing.answering(self._address, message):
            note(trace_id=tracing.trace_id() or None)
            return await self._handler(message)

    def _answered(
        self, part: Part, message: Work, work: Awaitable[wire.Reply], reply: asyncio.Future[wire.Reply]
    ) -> None:
        # Not in the task, which does not run at all when it is cancelled before its first step.
        if reply.cancelled():
            if isinstance(work, Coroutine):
                work.close()
            self.end(part, message, asyncio.CancelledError())
        elif (error := reply.exception()) is None:
            self.end(part, message, reply.result())
        else:
            unforeseen = type(error) is TesseraError and error.__cause__
            self.end(part, message, unforeseen or error)

    def begin(self, message: Work) -> Part:
        now = time.monotonic()
        part = self._newest.get(message.request_id)
        if part is None or now - part.began > _MOST_SECONDS:
            call = "embed" if isinstance(message, wire.EmbedRequest) else "encode"
            part = Part(RequestLine(message.request_id), call, now)
            self._newest[message.request_id] = part
        self._waiting.pop(part, None)
        part.calls += 1
        part.running += 1
        return part

    def end(self, part: Part, message: Work, outcome: wire.Reply | BaseException) -> None:
        """``outcome`` is the reply, or what was raised instead."""
        part.running -= 1
        part.ended, part.ended_at = time.monotonic(), time.time()
        _add(part, message, outcome)
        if isinstance(outcome, Exception) and not isinstance(outcome, TesseraError):
            # At once: its traceback keeps alive whatever the call had in hand.
            self._write(part, outcome)
        elif not part.running:
            self._waiting[part] = None
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self._linger, self._write_due)

    def flush(self) -> None:
        """Write the lines of requests that no call is running for."""
        for part in list(self._waiting):
            self._write(part)

    def _write_due(self) -> None:
        # First: should a line fail, the next request that ends sees to those that are left.
        self._timer = None
        now = time.monotonic()
        for part in list(self._waiting):
            if (left := part.ended + self._linger - now) > 0:
                # Not for each of them: many become due soon after one another.
                pause = max(left, self._linger / 20)
                self._timer = asyncio.get_running_loop().call_later(pause, self._write_due)
                return
            self._write(part)

    def _write(self, part: Part, unexpected: Exception | None = None) -> None:
        self._waiting.pop(part, None)
        if self._newest.get(part.line.request_id) is part:
            del self._newest[part.line.request_id]
        level = logging.ERROR if part.fault else logging.INFO
        sampled = part.fault or is_sampled(part.line.request_id, self._share)
        if not log.isEnabledFor(level) or not sampled:
            return
        outcome = "ok" if part.failure is None else part.failure.code
        fields: dict[str, Value] = {
            "request_id": part.line.request_id,
            "call": part.call,
            "endpoint": self._address,
            "outcome": outcome,
            "duration_ms": round((part.ended - part.began) * 1e3, 1),
            "calls": part.calls,
            **part.sums,
            **part.line.fields,
        }
        if part.timings is not None:
            fields |= part.timings.spent()
        if part.failure is not None and part.fault:
            fields["error"] = part.failure.message
        words = f"{part.call} {outcome}"
        log.handle(Line(log, level, words, fields, created=part.ended_at, error=unexpected))


async def _translated(work: Awaitable[wire.Reply]) -> wire.Reply:
    """The reply; what is no ``TesseraError`` is raised as an internal one."""
    try:
        return await work
    except TesseraError:
        raise
    except Exception as error:
        raise internal_error(error) from error


def _add(part: Part, message: Work, outcome: wire.Reply | BaseException) -> None:
    sums = part.sums
    if isinstance(message, wire.EmbedRequest):
        sums["inputs"] += len(message.items)
        sums["tokens"] += sum([item.token_count for item in message.items])
        sums["images"] += sum([len(item.images) for item in message.items])
    else:
        sums["images"] += 1
        sums["units"] += message.image.units
    if isinstance(outcome, wire.EmbedReply | wire.EncodeReply):
        part.timings = outcome.timings if part.timings is None else part.timings.merge(outcome.timings)
        if isinstance(outcome, wire.EmbedReply):
            sums["cached_tokens"] += sum(outcome.cached_tokens)
            if (rows := sum(outcome.counts)) != len(outcome.counts):
                sums["output_rows"] += rows
            if outcome.failures:
                sums["failed_inputs"] += len(outcome.failures)
            for failure in outcome.failures.values():
                _add_failure(part, failure.error())
    elif isinstance(outcome, BaseException):
        _add_failure(part, outcome)


def _add_failure(part: Part, error: BaseException) -> None:
    if not isinstance(error, Exception):
        error = RequestCancelled("the caller went away")
    elif not isinstance(error, TesseraError):
        error = TesseraError(f"{type(error).__name__}: {error}")
    # Clients would be told 500 or above for it.
    fault = not isinstance(error, RequestError | Overloaded | RequestCancelled)
    if part.failure is None or (fault and not part.fault):
        part.failure, part.fault = wire.Failure.of(error), fault
