"""Where spans go, by the names and variables of OpenTelemetry's own settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.metadata import entry_points

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tessera.errors import ConfigError

log = logging.getLogger(__name__)

_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


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
