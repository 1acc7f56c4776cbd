"""The tracer that records by OpenTelemetry's SDK; imported only when traces are on."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tessera import __version__
from tessera.errors import ConfigError, TesseraError
from tessera.tracing.tracer import Attributes, Kind, Reference, Span

try:
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context, attach, detach
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from tessera.tracing.exporters import make_exporter
    from tessera.tracing.sampler import LinkedSampler
except ImportError as missing:
    raise ConfigError(
        "traces need the extra 'traces' of pyproject.toml"
        f" (pip install -c constraints.txt -e '.[traces]'): {missing}"
    ) from missing
except ValueError as unknown:
    # OpenTelemetry looks for the propagators of the environment when it is imported.
    raise ConfigError(f"traces: {unknown}") from unknown

log = logging.getLogger(__name__)

_KINDS = {
    Kind.INTERNAL: trace.SpanKind.INTERNAL,
    Kind.SERVER: trace.SpanKind.SERVER,
    Kind.CLIENT: trace.SpanKind.CLIENT,
}

# A batch links to all of its requests, and short texts come in large batches. The SDK's own default is 128.
_MAX_LINKS = 4096
_MAX_LINKS_VARIABLE = "OTEL_SPAN_LINK_COUNT_LIMIT"


@dataclass(frozen=True, slots=True)
class _Reference:
    """A span's identity; what else its context holds cannot be hashed."""

    trace_id: int
    span_id: int
    context: trace.SpanContext = field(compare=False)


class _OtelSpan:
    """A span of OpenTelemetry behind ours."""

    __slots__ = ("_span",)

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def link(self, to: Reference) -> None:
        self._span.add_link(_context(to))

    def fail(self, kind: str) -> None:
        _fail(self._span, kind)


class OtelTracer:
    """Spans of one provider, which is not made OpenTelemetry's global one.

    Libraries that look for a global provider, FastAPI among them, would add spans of their own to it.
    """

    recording = True

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tessera", __version__)

    def span(
        self, name: str, attributes: Attributes | None = None, kind: Kind = Kind.INTERNAL
    ) -> AbstractContextManager[Span]:
        return _running(self._tracer.start_span(name, kind=_KINDS[kind], attributes=attributes))

    def serve(
        self, name: str, carrier: Mapping[str, str], attributes: Attributes | None = None
    ) -> AbstractContextManager[Span]:
        # Extracted into an empty context: whatever is under way here is not what asked.
        asked = propagate.extract(carrier, Context())
        return _running(
            self._tracer.start_span(name, context=asked, kind=trace.SpanKind.SERVER, attributes=attributes),
            asked,
        )

    def past(
        self,
        name: str,
        started: float,
        ended: float,
        *,
        parent: Reference | None = None,
        links: Sequence[Reference] = (),
        attributes: Attributes | None = None,
        error: str | None = None,
    ) -> Reference | None:
        context = Context()
        if parent is not None:
            span = trace.NonRecordingSpan(_context(parent))
            context = trace.set_span_in_context(span, context)
        # Spans have the time of day, in nanoseconds.
        offset = time.time_ns() - time.perf_counter_ns()
        recorded = self._tracer.start_span(
            name,
            context=context,
            attributes=attributes,
            links=[trace.Link(_context(link)) for link in links],
            start_time=offset + int(started * 1e9),
        )
        if error is not None:
            _fail(recorded, error)
        recorded.end(offset + int(ended * 1e9))
        return _reference(recorded)

    def carrier(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return carrier

    def here(self) -> Reference | None:
        return _reference(trace.get_current_span())

    def trace_id(self) -> str:
        context = trace.get_current_span().get_span_context()
        return f"{context.trace_id:032x}" if context.trace_flags.sampled else ""

    def annotate(self, attributes: Attributes) -> None:
        trace.get_current_span().set_attributes(attributes)

    def close(self, timeout: float) -> None:
        # The SDK waits half a minute for a collector that does not answer, longer than supervisors do.
        closing = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(timeout)
        if closing.is_alive():
            log.warning("the last traces were not exported within %.0f s", timeout)


def make_tracer(role: str, exporters: Sequence[str]) -> OtelTracer:
    """A tracer for a process with this role; ``OTEL_*`` variables set the rest. Raises ``ConfigError``."""
    limits = SpanLimits() if _MAX_LINKS_VARIABLE in os.environ else SpanLimits(max_links=_MAX_LINKS)
    try:
        provider = TracerProvider(resource=_resource(role), shutdown_on_exit=False, span_limits=limits)
        provider.sampler = LinkedSampler(provider.sampler)
        for name in exporters:
            provider.add_span_processor(BatchSpanProcessor(make_exporter(name)))
    except ValueError as error:
        raise ConfigError(f"traces: {error}") from error
    # The API warns of every header that it cannot read, and quotes it: clients could fill the log.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    logging.getLogger("opentelemetry.sdk").setLevel(logging.WARNING)
    return OtelTracer(provider)


def _resource(role: str) -> Resource:
    own = Resource(
        {
            "service.name": f"tessera-{role}",
            "service.version": __version__,
            "service.instance.id": str(uuid.uuid4()),
            "process.pid": os.getpid(),
            "tessera.role": role,
        }
    )
    # What the environment says goes before.
    return Resource.create().merge(own).merge(OTELResourceDetector().detect())


def _reference(span: trace.Span) -> Reference | None:
    context = span.get_span_context()
    return _Reference(context.trace_id, context.span_id, context) if context.trace_flags.sampled else None


def _context(reference: Reference) -> trace.SpanContext:
    assert isinstance(reference, _Reference)
    return reference.context


@contextmanager
def _running(span: trace.Span, within: Context | None = None) -> Iterator[Span]:
    token: Any = attach(trace.set_span_in_context(span, within))
    try:
        yield _OtelSpan(span)
    except BaseException as error:
        # No message and no stack: both may quote the request.
        _fail(span, error.code if isinstance(error, TesseraError) else _kind(error))
        raise
    finally:
        detach(token)
        span.end()


def _kind(error: BaseException) -> str:
    name = type(error).__name__
    return "cancelled" if name == "CancelledError" else name


def _fail(span: trace.Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(trace.StatusCode.ERROR)
