"""Traces of a running deployment: one request's through all its processes, and its batches' beside it."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.disaggregated import KEY, Disaggregated
from tests.e2e.inputs import image_input, picture
from tests.e2e.service import MODEL, free_ports
from tests.tracing.asking import Asker
from tests.tracing.collector import Collector, Exported, collecting
from tests.waiting import wait_until

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("shared-service")]

TEXT = "a sentence that is nobody's business"
QUERY = "signature=not-for-the-collector"
EMBED = "tessera.embed.generate/EmbedRequest"
ENCODE = "tessera.encode.generate/EncodeRequest"


@pytest.fixture(scope="module")
def asker(service: Disaggregated, traces: Collector) -> Iterator[Asker]:
    headers = {"authorization": f"Bearer {service.key}"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=60) as http:
        yield Asker(http, traces)


def tree(spans: list[Exported]) -> set[tuple[str, ...]]:
    """Each span as its path from the root: ``process: name`` with the kinds of calls."""
    by_id = {span.span: span for span in spans}

    def path(span: Exported) -> tuple[str, ...]:
        above = path(by_id[span.parent]) if span.parent in by_id else ()
        kind = "" if span.kind == "internal" else f" ({span.kind})"
        return (*above, f"{span.service.removeprefix('tessera-')}: {span.name}{kind}")

    return {path(span) for span in spans}


POST = ("frontend: POST /v1/embeddings (server)",)
ANSWER = (*POST, "frontend: dispatch", f"frontend: {EMBED} (client)", f"embed: {EMBED} (server)")
ROWS = (*ANSWER, "embed: vision rows")
ENCODING = (*ROWS, f"embed: {ENCODE} (client)", f"encode: {ENCODE} (server)")
EITHER = {
    POST,
    *(
        (*POST, f"frontend: {name}")
        for name in ("read body", "parse", "media", "prompt", "dispatch", "format")
    ),
    ANSWER[:3],
    ANSWER,
    ROWS,
    (*ANSWER, "embed: text queue"),
    (*ANSWER, "embed: text engine"),
}
MISS = EITHER | {
    ENCODING[:-1],
    ENCODING,
    *(
        (*ENCODING, f"encode: {name}")
        for name in ("preprocess", "slab", "vision queue", "vision engine", "publish")
    ),
    (*ROWS, "embed: transfer"),
}


def only(spans: list[Exported], name: str, kind: str = "internal") -> Exported:
    (found,) = (span for span in spans if (span.name, span.kind) == (name, kind))
    return found


def test_a_miss_goes_through_every_process_and_a_hit_past_the_encoder(asker: Asker) -> None:
    image = picture(8100)
    value = image_input(image, TEXT)
    miss = asker.traced(value, path=f"/v1/embeddings?{QUERY}")
    assert tree(miss) == MISS
    assert only(miss, "vision rows").attributes["tessera.cache"] == "miss"
    assert only(miss, "transfer").attributes["tessera.transfer.route"] == "shm"
    assert only(miss, "publish").attributes["tessera.transfer.route"] == "shm"

    hit = asker.traced(value)
    assert tree(hit) == EITHER
    rows = only(hit, "vision rows").attributes
    assert (rows["tessera.cache"], rows["tessera.input"]) == ("hit", "input[0][0].image_url.url")

    head = only(hit, "POST /v1/embeddings", "server")
    assert head.attributes["http.response.status_code"] == 200
    assert head.attributes["tessera.model"] == MODEL
    for span in hit:
        if "rpc.method" in span.attributes:
            assert span.attributes["tessera.request_id"] == head.attributes["tessera.request_id"]
    said = str(asker.collector.all())
    for secret in (TEXT, QUERY, KEY, base64.b64encode(image).decode()[:64]):
        assert secret not in said


def test_who_shares_an_encoding_links_to_whom_it_was_made_for(asker: Asker) -> None:
    value = image_input(picture(8200))
    spans = asker.traced(value, value)
    rows = {span.attributes["tessera.cache"]: span for span in spans if span.name == "vision rows"}
    assert rows.keys() == {"miss", "joined"}
    assert rows["joined"].links == ((rows["miss"].trace, rows["miss"].span),)
    assert only(spans, ENCODE, "client").parent == rows["miss"].span


def test_the_clients_trace_is_kept(asker: Asker) -> None:
    spans = asker.traced("one text")
    head = only(spans, "POST /v1/embeddings", "server")
    asked = asker.post("one text")
    answered = asked.answer.headers["traceresponse"].split("-")
    assert answered[1] == asked.trace and answered[2] != asked.span
    assert head.parent not in {span.span for span in spans}


def test_a_batch_links_to_the_requests_that_met_in_it(asker: Asker) -> None:
    batch, riders = asker.together(8)
    assert batch.parent == "" and batch.trace not in {one.trace for one in riders}
    # What kept the engine busy may be in it, too.
    assert len(riders) <= len(batch.links) <= batch.attributes["tessera.batch.entries"]
    assert batch.attributes["tessera.batch.tokens"] > 0
    for one in riders:
        spans = asker.collector.trace(one.trace)
        answer = only(spans, EMBED, "server")
        assert (one.trace, answer.span) in batch.links
        assert only(spans, "text engine").links == ((batch.trace, batch.span),)


def test_a_client_that_keeps_no_trace_leaves_none_and_a_bad_traceparent_begins_one(asker: Asker) -> None:
    silent = asker.post("one text", kept=False)
    assert silent.answer.status_code == 200
    assert silent.answer.headers["traceresponse"].endswith("-00")
    headers = {"traceparent": "00-nothing-of-the-kind-01"}
    answer = asker.http.post("/v1/embeddings", json={"model": MODEL, "input": ""}, headers=headers)
    _, trace, span, kept = answer.headers["traceresponse"].split("-")
    assert answer.status_code == 400 and int(kept, 16) & 1
    asker.collector.wait(lambda spans: span in {one.span for one in spans})
    head = only(asker.collector.trace(trace), "POST /v1/embeddings", "server")
    # The client's mistake is none of the service's.
    assert head.parent == "" and not head.failed
    assert head.attributes["tessera.error.code"] == answer.json()["error"]["code"]
    assert asker.collector.trace(silent.trace) == []


def test_what_looks_leaves_no_span(asker: Asker) -> None:
    for path in ("/health", "/metrics", "/status", "/v1/models"):
        assert "traceresponse" not in asker.http.get(path).headers


@pytest.mark.usefixtures("forks")
def test_a_process_that_ends_exports_what_it_has(checkpoint: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tessera.frontend", "--model-path", str(checkpoint), "--traces"]
    command += ["--served-model-name", MODEL, "--port", str(port), "--worker-wait-seconds", "0"]
    with collecting() as collector:
        # None is exported before the end.
        settings = {**collector.environment(), "OTEL_BSP_SCHEDULE_DELAY": "600000"}
        del settings["OTEL_TRACES_EXPORTER"]
        environment = {**os.environ, **settings, "DYN_FILE_KV": str(tmp_path)}
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            answer = _patiently(f"http://127.0.0.1:{port}/v1/embeddings", process)
            assert answer.status_code == 503 and collector.all() == []
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        head = only(collector.all(), "POST /v1/embeddings", "server")
        assert head.failed and head.attributes["http.response.status_code"] == 503


def _patiently(url: str, process: subprocess.Popen[bytes]) -> httpx.Response:
    # A refusal is false.
    return wait_until(
        lambda: [httpx.post(url, json={"model": MODEL, "input": "text"})],
        despite=httpx.TransportError,
        process=process,
    )[0]
