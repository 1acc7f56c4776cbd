"""Spans of requests, calls and batches, by OpenTelemetry's API; its SDK records them after ``start``.

Before ``start``, and in a process that records nothing, every span is the API's invalid one, after one check.
The API's own no-op tracer would attach a context for each span: 6 to 10 µs where the check takes 0.5 µs, and
a request with an image has fifteen spans.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind, Tracer, set_span_in_context

from tessera import wire
from tessera.errors import TesseraError

Attributes = Mapping[str, str | bool | int | float]

M = TypeVar("M", bound=wire.Request)

# Requests that ask for work; the others only look after the deployment.
_WORK: Final = wire.EmbedRequest | wire.EncodeRequest


@dataclass(frozen=True, slots=True)
class Recorder:
    """What ``start`` makes. ``close`` exports what is left, for at most so many seconds."""

    tracer: Tracer
    propagator: TextMapPropagator
    close: Callable[[float], None]


_recorder: Recorder | None = None


def start(role: str, exporters: Sequence[str]) -> None:
    """Record spans from now on, as a process with this role; without exporters nothing changes.

    ``exporters`` are names as in ``OTEL_TRACES_EXPORTER``. Raises ``ConfigError`` for one that is not
    installed or not configured well, and where the SDK is missing.
    """
    global _recorder
    if exporters:
        from tessera.tracing.sdk import make_recorder

        _recorder = make_recorder(role, exporters)


def stop(timeout: float = 5.0) -> None:
    """Export what is left, for at most ``timeout`` seconds, and record nothing any more."""
    global _recorder
    last, _recorder = _recorder, None
    if last is not None:
        last.close(timeout)


def recording() -> bool:
    return _recorder is not None


def span(
    name: str, attributes: Attributes | None = None, kind: SpanKind = SpanKind.INTERNAL
) -> AbstractContextManager[Span]:
    """A span inside the one that is under way. An exception that leaves it marks it as failed."""
    if _recorder is None:
        return INVALID_SPAN
    return _running(_recorder.tracer.start_span(name, kind=kind, attributes=attributes))


def serve(
    name: str, carrier: Mapping[str, str], attributes: Attributes | None = None
) -> AbstractContextManager[Span]:
    """A span of work that another process asked for; ``carrier`` is what came with the request.

    A carrier that names no valid span begins a new trace.
    """
    if _recorder is None:
        return INVALID_SPAN
    # Extracted into an empty context: the span under way here is not the parent.
    context = _recorder.propagator.extract(carrier, Context())
    return _running(
        _recorder.tracer.start_span(name, context, kind=SpanKind.SERVER, attributes=attributes), context
    )


def carrier() -> dict[str, str]:
    """The headers that a request to another process carries, so that its spans nest in the one under way."""
    headers: dict[str, str] = {}
    if _recorder is not None:
        _recorder.propagator.inject(headers)
    return headers


def here() -> Span | None:
    """The span under way, or None when it is not kept."""
    return None if _recorder is None else _kept(trace.get_current_span())


def trace_id() -> str:
    """The trace under way in lower-case hex, empty when it is not kept."""
    span = here()
    return "" if span is None else trace.format_trace_id(span.get_span_context().trace_id)


def traceparent(span: Span) -> str:
    """The span as the W3C's Trace Context writes it."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def annotate(attributes: Attributes) -> None:
    """Add to the span under way."""
    if _recorder is not None:
        trace.get_current_span().set_attributes(attributes)


def fail(span: Span, code: str) -> None:
    """Mark the span's work as failed; ``code`` is an error's code, never its message."""
    span.set_attribute("error.type", code)
    span.set_status(trace.StatusCode.ERROR)


def past(
    name: str,
    started: float,
    ended: float,
    *,
    parent: Span | None = None,
    links: Iterable[Span] = (),
    attributes: Attributes | None = None,
    error: BaseException | None = None,
) -> Span | None:
    """Record work that is over, between two readings of ``time.perf_counter``.

    Without a parent it is a trace of its own, which is kept when one of its links is. None when it is not
    kept.
    """
    if _recorder is None:
        return None
    # Spans have the time of day, in nanoseconds.
    offset = time.time_ns() - time.perf_counter_ns()
    recorded = _recorder.tracer.start_span(
        name,
        Context() if parent is None else set_span_in_context(parent, Context()),
        attributes=attributes,
        links=[Link(link.get_span_context()) for link in links],
        start_time=offset + int(started * 1e9),
    )
    if error is not None:
        fail(recorded, _code(error))
    recorded.end(offset + int(ended * 1e9))
    return _kept(recorded)


def calling(address: str, instance: int, message: wire.Request) -> AbstractContextManager[Span]:
    """The span of a call to that instance."""
    if not isinstance(message, _WORK):
        return INVALID_SPAN
    attributes = _call(address, message) | {"tessera.instance": f"{instance:x}"}
    return span(str(attributes["rpc.method"]), attributes, SpanKind.CLIENT)


def carrying(message: M) -> M:
    """The message as it is to be sent: it names the span under way if it asks for work."""
    if _recorder is None or not isinstance(message, _WORK):
        return message
    return msgspec.structs.replace(message, trace=carrier())


def answering(address: str, message: wire.Request) -> AbstractContextManager[Span]:
    """The span of the answer to a message that came to this address."""
    if _recorder is None or not isinstance(message, _WORK):
        return INVALID_SPAN
    attributes = _call(address, message)
    return serve(str(attributes["rpc.method"]), message.trace, attributes)


def batch_queued(stage: str, entries: Iterable[tuple[Span | None, float]], ended: float) -> None:
    """A batch's time in the queue until ``ended``: one span in each request, from its first entry on.

    ``entries`` are the batch's: the span each was submitted in, and when. Call it while ``recording``.
    """
    began: dict[Span, float] = {}
    for request, enqueued in entries:
        if request is not None:
            began[request] = min(enqueued, began.get(request, ended))
    for request, enqueued in began.items():
        past(f"{stage} queue", enqueued, ended, parent=request)


def batch_ran(
    stage: str,
    entries: Iterable[Span | None],
    started: float,
    ended: float,
    describe: Callable[[], Attributes],
    error: Exception | None = None,
) -> None:
    """A batch as a trace of its own, linked to all of its requests; and a span in each request's trace.

    ``entries`` are the spans that the batch's entries were submitted in; ``describe`` gives the batch's
    attributes, and is called only for a batch with a request that is kept. Call it while ``recording``.
    """
    spans = list(entries)
    shares = Counter(filter(None, spans))
    if not shares:
        return
    size: dict[str, str | bool | int | float] = {"tessera.batch.entries": len(spans)}
    whole = {**size, **describe()}
    batch = past(f"{stage} batch", started, ended, links=shares, attributes=whole, error=error)
    links = () if batch is None else (batch,)
    for request, share in shares.items():
        part = size | {"tessera.batch.share": share}
        past(f"{stage} engine", started, ended, parent=request, links=links, attributes=part, error=error)


@contextmanager
def _running(span: Span, within: Context | None = None) -> Iterator[Span]:
    token = attach(set_span_in_context(span, within))
    try:
        yield span
    except BaseException as error:
        # Neither message nor stack, which the API's own ``use_span`` would add: both may quote the request.
        fail(span, _code(error))
        raise
    finally:
        detach(token)
        span.end()


def _kept(span: Span) -> Span | None:
    return span if span.get_span_context().trace_flags.sampled else None


def _code(error: BaseException) -> str:
    if isinstance(error, TesseraError):
        return error.code
    name = type(error).__name__
    return "cancelled" if name == "CancelledError" else name


def _call(address: str, message: wire.EmbedRequest | wire.EncodeRequest) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "rpc.system.name": "dynamo",
        "rpc.method": f"{address.removeprefix('dyn://')}/{type(message).__name__}",
        "tessera.request_id": message.request_id,
    }
    if isinstance(message, wire.EmbedRequest):
        return attributes | {
            "tessera.items": len(message.items),
            "tessera.tokens": sum(item.token_count for item in message.items),
            "tessera.images": sum(len(item.images) for item in message.items),
            "tessera.queries": len(message.queries),
        }
    return attributes | {"tessera.units": message.image.units, "tessera.input": message.image.param}
