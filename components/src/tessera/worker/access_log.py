"""The line that a worker writes about each request that it has a part in."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tessera import tracing, wire
from tessera.errors import Overloaded, RequestCancelled, RequestError, TesseraError
from tessera.logs import RequestLine, Value, note, serving
from tessera.rpc import internal_error

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
    sums: dict[str, int] = field(default_factory=dict)
    timings: wire.Timings = field(default_factory=wire.Timings)
    failure: wire.Failure | None = None
    fault: bool = False
    timer: asyncio.TimerHandle | None = None


class AccessLog:
    """Writes one line for each request, however many calls bring its inputs or images here.

    A line is written once no more calls have come for ``linger`` seconds, with the time at which the last of
    them was answered. Owned by one event loop.
    """

    def __init__(self, address: str, handler: Handler, *, linger: float = _LINGER_SECONDS) -> None:
        self._address = address
        self._handler = handler
        self._linger = linger
        self._newest: dict[str, Part] = {}
        self._waiting: set[Part] = set()

    async def answer(self, message: wire.Request) -> wire.Reply:
        """What the handler replies to a call; the call's part of the line and its span are recorded.

        Only calls that ask for work are. An error that is no ``TesseraError`` is written with its traceback
        and raised as an internal one.
        """
        if not isinstance(message, wire.EmbedRequest | wire.EncodeRequest):
            return await self._handler(message)
        part = self.begin(message)
        try:
            with serving(part.line), tracing.answering(self._address, message):
                note(trace_id=tracing.trace_id() or None)
                reply = await self._handler(message)
        except BaseException as error:
            self.end(part, message, error)
            if isinstance(error, Exception) and not isinstance(error, TesseraError):
                raise internal_error(error) from error
            raise
        self.end(part, message, reply)
        return reply

    def begin(self, message: Work) -> Part:
        now = time.monotonic()
        part = self._newest.get(message.request_id)
        if part is None or now - part.began > _MOST_SECONDS:
            call = "embed" if isinstance(message, wire.EmbedRequest) else "encode"
            part = Part(RequestLine(message.request_id), call, now)
            self._newest[message.request_id] = part
        if part.timer is not None:
            part.timer.cancel()
            part.timer = None
            self._waiting.discard(part)
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
            part.timer = asyncio.get_running_loop().call_later(self._linger, self._write, part)
            self._waiting.add(part)

    def flush(self) -> None:
        """Write the lines of requests that no call is running for."""
        for part in list(self._waiting):
            self._write(part)

    def _write(self, part: Part, unexpected: Exception | None = None) -> None:
        if part.timer is not None:
            part.timer.cancel()
        self._waiting.discard(part)
        if self._newest.get(part.line.request_id) is part:
            del self._newest[part.line.request_id]
        level = logging.ERROR if part.fault else logging.INFO
        if not log.isEnabledFor(level):
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
            **part.timings.spent(),
        }
        if part.failure is not None and part.fault:
            fields["error"] = part.failure.message
        trace = None
        if unexpected is not None:
            trace = (type(unexpected), unexpected, unexpected.__traceback__)
        words = (part.call, outcome)
        record = log.makeRecord(log.name, level, __file__, 0, "%s %s", words, trace, extra={"fields": fields})
        record.created = part.ended_at
        record.msecs = part.ended_at % 1 * 1e3
        log.handle(record)


def _add(part: Part, message: Work, outcome: wire.Reply | BaseException) -> None:
    def count(**numbers: int) -> None:
        for name, number in numbers.items():
            part.sums[name] = part.sums.get(name, 0) + number

    if isinstance(message, wire.EmbedRequest):
        images = sum(len(item.images) for item in message.items)
        count(
            inputs=len(message.items),
            tokens=sum(item.token_count for item in message.items),
            images=images,
        )
    else:
        count(images=1, units=message.image.units)
    if isinstance(outcome, wire.EmbedReply):
        count(cached_tokens=sum(outcome.cached_tokens))
        if outcome.failures:
            count(failed_inputs=len(outcome.failures))
            for failure in outcome.failures.values():
                _add_failure(part, failure.error())
    if isinstance(outcome, wire.EmbedReply | wire.EncodeReply):
        part.timings = part.timings.merge(outcome.timings)
    elif isinstance(outcome, TesseraError):
        _add_failure(part, outcome)
    elif isinstance(outcome, Exception):
        _add_failure(part, TesseraError(f"{type(outcome).__name__}: {outcome}"))
    elif isinstance(outcome, BaseException):
        _add_failure(part, RequestCancelled("the caller went away"))


def _add_failure(part: Part, error: TesseraError) -> None:
    # Clients would be told 500 or above for it.
    fault = not isinstance(error, RequestError | Overloaded | RequestCancelled)
    if part.failure is None or (fault and not part.fault):
        part.failure, part.fault = wire.Failure.of(error), fault
