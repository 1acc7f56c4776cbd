"""A collector of traces: takes OTLP over HTTP on a real socket and decodes what comes."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

Value = str | bool | int | float


@dataclass(frozen=True, slots=True)
class Exported:
    """One span as it arrived; ids are lower-case hex, ``parent`` is empty at the root, times in nanoseconds.

    ``links`` holds (trace, span) pairs; ``service`` is the resource's ``service.name``.
    """

    service: str
    name: str
    kind: str
    trace: str
    span: str
    parent: str
    started: int
    ended: int
    attributes: dict[str, Value]
    links: tuple[tuple[str, str], ...]
    failed: bool
    resource: dict[str, Value]

    @property
    def milliseconds(self) -> float:
        return (self.ended - self.started) / 1e6


@dataclass(slots=True)
class Collector:
    """What has arrived so far, from all processes."""

    url: str
    _spans: list[Exported] = field(default_factory=list)
    _arrived: threading.Condition = field(default_factory=threading.Condition)

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self._arrived:
            self._spans += _exported(request)
            self._arrived.notify_all()

    def all(self) -> list[Exported]:
        with self._arrived:
            return list(self._spans)

    def trace(self, trace: str) -> list[Exported]:
        """The spans of one trace by their start."""
        return sorted((span for span in self.all() if span.trace == trace), key=lambda span: span.started)

    def wait(self, enough: Callable[[list[Exported]], Any], timeout: float = 30.0) -> None:
        """Wait until what has arrived is enough."""
        deadline = time.monotonic() + timeout
        with self._arrived:
            while not enough(self._spans):
                left = deadline - time.monotonic()
                assert left > 0, "\n".join(f"{span.service}: {span.name}" for span in self._spans)
                self._arrived.wait(left)

    def environment(self) -> dict[str, str]:
        """What makes a process send its traces here, several times a second."""
        return {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }


@contextmanager
def collecting(port: int = 0) -> Iterator[Collector]:
    """A collector on that port of loopback, on any free one by default."""
    collector: Collector

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            collector.take(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _exported(request: ExportTraceServiceRequest) -> list[Exported]:
    found = []
    for group in request.resource_spans:
        resource = _values(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                found.append(
                    Exported(
                        service=str(resource["service.name"]),
                        name=span.name,
                        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
                        trace=span.trace_id.hex(),
                        span=span.span_id.hex(),
                        parent=span.parent_span_id.hex(),
                        started=span.start_time_unix_nano,
                        ended=span.end_time_unix_nano,
                        attributes=_values(span.attributes),
                        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
                        resource=resource,
                    )
                )
    return found


def _values(attributes: Any) -> dict[str, Value]:
    return {entry.key: _value(entry) for entry in attributes}


def _value(entry: KeyValue) -> Value:
    value: Value = getattr(entry.value, entry.value.WhichOneof("value") or "string_value")
    return value
