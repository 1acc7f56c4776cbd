"""Where spans go, by the names and variables of OpenTelemetry's own settings."""

from __future__ import annotations

import os
from importlib.metadata import entry_points

from opentelemetry.sdk.trace.export import SpanExporter

from tessera.errors import ConfigError

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
    return exporter


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
