"""Recording and exporting, by the standard's own variables."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from concurrent import futures
from contextlib import suppress

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind

from tessera import tracing
from tessera.errors import ConfigError, InvalidInput, MediaFetchError
from tessera.frontend.media import MediaBudget
from tessera.frontend.media.fetch import Fetcher
from tessera.frontend.settings import parse as parse_frontend
from tessera.tasks import Deadline
from tessera.tracing.sdk import make_exporter
from tessera.worker.settings import parse as parse_worker
from tests.e2e.service import free_ports
from tests.frontend.media.hostile import LoopbackPolicy, response, server
from tests.tracing.collector import Collector, collecting

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_spans_nest_and_keep_the_callers_trace(collector: Collector) -> None:
    with tracing.serve("answer", {"traceparent": CLIENT, "tracestate": "vendor=1"}, {"size": 3}):
        sent = tracing.carrier()
        with tracing.span("inside", kind=SpanKind.CLIENT) as span:
            span.set_attributes({"found": True})
    with tracing.serve("elsewhere", sent):
        pass
    tracing.stop()
    answer, inside, elsewhere = collector.trace(CLIENT[3:35])
    assert (answer.kind, answer.parent, answer.attributes) == ("server", CLIENT[36:52], {"size": 3})
    assert (inside.kind, inside.parent, inside.attributes) == ("client", answer.span, {"found": True})
    assert elsewhere.parent == answer.span and sent["tracestate"] == "vendor=1"
    assert answer.resource["tessera.role"] == "test" and answer.service == "tessera-test"
    assert abs(answer.ended / 1e9 - time.time()) < 60


@pytest.mark.parametrize(
    "invalid", ["", "00-junk", CLIENT.replace("0af7", "zzzz"), "00-" + "0" * 32 + CLIENT[35:]]
)
def test_an_invalid_traceparent_begins_a_new_trace(collector: Collector, invalid: str) -> None:
    with tracing.serve("answer", {"traceparent": invalid}):
        pass
    tracing.stop()
    (answer,) = collector.all()
    assert answer.parent == "" and int(answer.trace, 16) != 0 and answer.trace not in CLIENT


def test_headers_that_cannot_be_read_leave_no_line(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    state = ",".join(["a=b", "a=c", "?=?", "\u00e9=1", *(f"k{index}=v" for index in range(40))])
    for baggage in ("?", "k", "k=v" * 4000, ",".join("k=v" for _ in range(400)), "\u00e9=1", ";;=,"):
        with tracing.serve("answer", {"traceparent": CLIENT, "tracestate": state, "baggage": baggage}):
            tracing.carrier()
    assert caplog.records == []


def test_a_batch_links_to_more_requests_than_the_sdk_keeps_by_itself(collector: Collector) -> None:
    asked = []
    for _ in range(300):
        with tracing.serve("request", {}):
            asked.append(tracing.here())
    tracing.past("batch", 1.0, 2.0, links=asked)
    tracing.stop()
    (batch,) = (span for span in collector.all() if span.name == "batch")
    assert len(batch.links) == 300 and batch.milliseconds == 1000


async def test_a_fetch_is_told_without_path_and_query(collector: Collector) -> None:
    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        found = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
        assert "traceparent" not in head.lower()
        writer.write(found if "missing" in head else response(b"image"))

    async with server(handler) as port:
        fetcher = Fetcher(LoopbackPolicy())
        for path in ("there", "missing"):
            url = f"http://127.0.0.1:{port}/{path}?token=hunter2"
            with suppress(MediaFetchError):
                await fetcher.get(
                    url, param="input", deadline=Deadline.after(60), budget=MediaBudget(1 << 20)
                )
        await fetcher.close()
    tracing.stop()
    there, missing = collector.all()
    assert (there.name, there.kind, there.attributes["http.response.status_code"]) == ("GET", "client", 200)
    assert missing.failed and missing.attributes["http.response.status_code"] == 404
    assert missing.attributes["error.type"] == "media_fetch_failed"
    assert missing.attributes["server.address"] == "127.0.0.1"
    assert "hunter2" not in str(collector.all()) and "missing" not in str(missing)


def test_an_error_leaves_its_code_and_none_of_its_words(collector: Collector) -> None:
    with pytest.raises(InvalidInput), tracing.span("parse"):
        raise InvalidInput("secret words of the client")
    with pytest.raises(asyncio.CancelledError), tracing.span("wait"):
        raise asyncio.CancelledError
    tracing.stop()
    parse, wait = collector.all()
    assert parse.failed and parse.attributes == {"error.type": "invalid_input"}
    assert wait.failed and wait.attributes == {"error.type": "cancelled"}


def test_a_sampler_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as running:
        for name, value in {**running.environment(), "OTEL_TRACES_SAMPLER": "always_off"}.items():
            monkeypatch.setenv(name, value)
        tracing.start("test", ["otlp"])
        with tracing.serve("answer", {"traceparent": CLIENT}):
            assert tracing.here() is None
            assert tracing.carrier()["traceparent"].endswith("-00")
        tracing.stop()
        assert running.all() == []


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as running:
        resource = {
            "OTEL_SERVICE_NAME": "embeddings",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        }
        for name, value in (running.environment() | resource).items():
            monkeypatch.setenv(name, value)
        tracing.start("frontend", ["otlp"])
        with tracing.span("work"):
            pass
        tracing.stop()
        (work,) = running.all()
        assert work.service == "embeddings" and work.resource["tessera.role"] == "frontend"
        assert work.resource["deployment.environment.name"] == "test"


def test_a_collector_that_never_answers_delays_no_work_and_little_of_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
        tracing.start("test", ["otlp"])
        accepted, _ = silent.accept() if _first_span() else (None, None)
        # The exporter now waits for an answer, and the queue overflows many times.
        for _ in range(2000):
            with tracing.span("work"):
                pass
        tracing.stop(timeout=0.2)
        assert not tracing.recording()
        assert accepted is not None
        accepted.close()


def _first_span() -> bool:
    with tracing.span("first"):
        pass
    return True


def test_an_outage_is_told_once_and_its_end_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    # Too short for a second attempt.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.75")
    exporter = make_exporter("otlp")
    spans = [ReadableSpan("one", context=SpanContext(1, 1, is_remote=False))] * 3
    for _ in range(3):
        assert exporter.export(spans) is not SpanExportResult.SUCCESS
    with collecting(port) as collector:
        assert exporter.export(spans) is SpanExportResult.SUCCESS
    exporter.shutdown()
    told = [record.getMessage() for record in caplog.records if record.name.startswith("tessera")]
    assert told == [
        "traces cannot be exported; spans are lost until they can",
        "traces are exported again; 9 spans were lost",
    ]
    assert sum(record.name.startswith("opentelemetry") for record in caplog.records) == 1
    assert len(collector.all()) == 3


def test_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
            scopes = (scope for group in request.resource_spans for scope in group.scope_spans)
            taken.extend(span.name for scope in scopes for span in scope.spans)
            return ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        tracing.start("test", ["otlp"])
        with tracing.span("work"):
            pass
        tracing.stop()
    finally:
        server.stop(None)
    assert taken == ["work"]


@pytest.mark.parametrize(
    ("exporter", "protocol", "match"),
    [("jaeger", "http/protobuf", "no exporter 'jaeger'"), ("otlp", "carrier pigeon", "'carrier pigeon'")],
)
def test_a_wrong_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, exporter: str, protocol: str, match: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with pytest.raises(ConfigError, match=match):
        tracing.start("test", [exporter])
    assert not tracing.recording()


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ([], {}, ()),
        ([], {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, ()),
        ([], {"OTEL_TRACES_EXPORTER": "otlp"}, ("otlp",)),
        ([], {"OTEL_TRACES_EXPORTER": "none"}, ()),
        ([], {"OTEL_TRACES_EXPORTER": "otlp, console"}, ("otlp", "console")),
        (["--traces"], {}, ("otlp",)),
        (["--traces"], {"OTEL_TRACES_EXPORTER": "console"}, ("console",)),
        (["--no-traces"], {"OTEL_TRACES_EXPORTER": "otlp"}, ()),
        (["--traces"], {"OTEL_SDK_DISABLED": "true"}, ()),
    ],
)
def test_traces_are_off_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], environment: dict[str, str], expected: tuple[str, ...]
) -> None:
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    arguments = ["--model-path", "/model", *flags]
    assert parse_frontend(arguments).traces == expected
    assert parse_worker(arguments).traces == expected


@pytest.mark.starts
def test_processes_without_traces_load_no_sdk() -> None:
    program = """
import sys
import tessera.frontend.__main__
import tessera.worker.__main__
from tessera import tracing
from tessera.worker.settings import parse
tracing.start("test", parse(["--model-path", "/model"]).traces)
with tracing.span("work"), tracing.serve("answer", {}):
    assert tracing.carrier() == {} and tracing.here() is None
print(*(name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))))
assert "tessera.tracing.sdk" not in sys.modules
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout.strip() == ""
