"""Traces of requests: one tracer for each process, which records nothing until ``start``.

Like logging, it is reached from everywhere by its module, because a span concerns every layer and none of
them decides where it goes. OpenTelemetry is imported by ``start`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from tessera.tracing.tracer import Attributes, Kind, NullTracer, Reference, Span, Tracer

__all__ = [
    "Attributes",
    "Kind",
    "Reference",
    "Span",
    "annotate",
    "carrier",
    "here",
    "past",
    "recording",
    "serve",
    "span",
    "start",
    "stop",
    "trace_id",
]

_tracer: Tracer = NullTracer()


def start(role: str, exporters: Sequence[str]) -> None:
    """Record spans of a process with this role from now on; without exporters nothing changes.

    ``exporters`` are names as in ``OTEL_TRACES_EXPORTER``. Raises ``ConfigError`` for one that is not
    installed or not configured well.
    """
    global _tracer
    if exporters:
        from tessera.tracing.otel import make_tracer

        _tracer = make_tracer(role, exporters)


def stop(timeout: float = 5.0) -> None:
    """Export what is left, for at most ``timeout`` seconds, and record nothing any more."""
    global _tracer
    last, _tracer = _tracer, NullTracer()
    last.close(timeout)


def recording() -> bool:
    return _tracer.recording


def span(
    name: str, attributes: Attributes | None = None, kind: Kind = Kind.INTERNAL
) -> AbstractContextManager[Span]:
    """As ``Tracer.span``."""
    return _tracer.span(name, attributes, kind)


def serve(
    name: str, carrier: Mapping[str, str], attributes: Attributes | None = None
) -> AbstractContextManager[Span]:
    """As ``Tracer.serve``."""
    return _tracer.serve(name, carrier, attributes)


def past(
    name: str,
    started: float,
    ended: float,
    *,
    parent: Reference | None = None,
    links: Sequence[Reference] = (),
    attributes: Attributes | None = None,
    error: str | None = None,
) -> Reference | None:
    """As ``Tracer.past``."""
    return _tracer.past(name, started, ended, parent=parent, links=links, attributes=attributes, error=error)


def carrier() -> dict[str, str]:
    """As ``Tracer.carrier``."""
    return _tracer.carrier()


def here() -> Reference | None:
    """As ``Tracer.here``."""
    return _tracer.here()


def trace_id() -> str:
    """As ``Tracer.trace_id``."""
    return _tracer.trace_id()


def annotate(attributes: Attributes) -> None:
    """As ``Tracer.annotate``."""
    _tracer.annotate(attributes)
