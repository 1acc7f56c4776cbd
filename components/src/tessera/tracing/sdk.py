"""Recording by OpenTelemetry's SDK: which spans are kept, and where they go. Imported when traces are on."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Sequence
from importlib.metadata import entry_points

from tessera import __version__
from tessera.errors import ConfigError
from tessera.extras import missing
from tessera.tracing import Recorder

try:
    from opentelemetry import propagate
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
    from opentelemetry.trace import Link, SpanKind, TraceState, get_current_span
    from opentelemetry.util.types import Attributes
except ImportError as error:
    raise missing("OTEL_TRACES_EXPORTER", error.name or "a package", extra="traces") from error
except ValueError as unknown:
    # OpenTelemetry looks for the propagators of the environment when it is imported.
    raise ConfigError(f"traces: {unknown}") from unknown

log = logging.getLogger(__name__)

_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}

# A batch links to all of its requests, and short texts come in large batches. The SDK's own default is 128.
_MAX_LINKS = 4096
_MAX_LINKS_VARIABLE = "OTEL_SPAN_LINK_COUNT_LIMIT"


def make_recorder(role: str, exporters: Sequence[str]) -> Recorder:
    """For a process with this role; ``OTEL_*`` variables set the rest. Raises ``ConfigError``.

    The provider is not made OpenTelemetry's global one: libraries that look for that, FastAPI among them,
    would add spans of their own to it.
    """
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

    def close(timeout: float) -> None:
        # The SDK waits half a minute for a collector that does not answer, longer than supervisors do.
        closing = threading.Thread(target=provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(timeout)
        if closing.is_alive():
            log.warning("the last traces were not exported within %.0f s", timeout)

    return Recorder(provider.get_tracer("tessera", __version__), propagate.get_global_textmap(), close)


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


class LinkedSampler(Sampler):
    """Keeps the trace of a batch when one of its requests is kept; everything else as ``others`` says.

    A batch has many parents and so none: a sampler that looks at parents or trace ids would decide on it
    without its requests, and leave their links pointing nowhere.
    """

    def __init__(self, others: Sampler) -> None:
        self._others = others

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        if not links or get_current_span(parent_context).get_span_context().is_valid:
            return self._others.should_sample(
                parent_context, trace_id, name, kind, attributes, links, trace_state
            )
        kept = any(link.context.trace_flags.sampled for link in links)
        return SamplingResult(Decision.RECORD_AND_SAMPLE if kept else Decision.DROP, attributes)

    def get_description(self) -> str:
        return f"LinkedSampler({self._others.get_description()})"


def make_exporter(name: str) -> SpanExporter:
    """The exporter of that name in ``OTEL_TRACES_EXPORTER``; ``otlp`` speaks the protocol that is set.

    Its address, headers and certificates come from ``OTEL_EXPORTER_OTLP_*``. Raises ``ConfigError`` for one
    that is not installed or cannot be made.
    """
    found = list(entry_points(group="opentelemetry_traces_exporter", name=_entry_point(name)))
    if not found:
        raise ConfigError(
            f"traces: no exporter {name!r} is installed; the extra 'traces' brings otlp and console"
        )
    try:
        exporter: SpanExporter = found[0].load()()
    except Exception as error:
        raise ConfigError(f"traces: the exporter {name!r} cannot be made: {error}") from error
    return _Watched(exporter)


class _Watched(SpanExporter):
    """Says once that an exporter fails, and once that it works again.

    By itself it would tell of every attempt and every lost batch, for as long as a collector is down.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._lost = 0
        self._own_log = logging.getLogger("opentelemetry.exporter")
        self._own_log.setLevel(logging.ERROR)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._lost:
                log.warning("traces cannot be exported; spans are lost until they can")
                self._own_log.setLevel(logging.CRITICAL)
            self._lost += len(spans)
        elif self._lost:
            log.warning("traces are exported again; %d spans were lost", self._lost)
            self._own_log.setLevel(logging.ERROR)
            self._lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _entry_point(name: str) -> str:
    if name != "otlp":
        return name
    protocol = (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )
    if protocol not in _PROTOCOLS:
        raise ConfigError(f"traces: the OTLP protocol {protocol!r} is none of {', '.join(_PROTOCOLS)}")
    return _PROTOCOLS[protocol]
