"""API keys, rates and the result cache of a running service; each test has a key of its own."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.e2e.inputs import cosine, data_url
from tests.e2e.service import MODEL, Service, launch
from tests.signals import freeze
from tests.waiting import wait_for_line

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("clients")]

NAMES = ("open", "requests", "tokens", "cache", "flight", "stopped")
Open = Callable[[str], httpx.Client]


def key(name: str) -> str:
    return f"sk-{name}-0123456789abcdef"


@pytest.fixture(scope="module")
def service(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("access")
    keys = folder / "keys"
    keys.write_text("# one for each test\n" + "".join(f"{key(name)} {name}\n" for name in NAMES))
    flags = f"--api-keys-file {keys} --requests-per-minute 30 --tokens-per-minute 20000 --result-cache-mb 1"
    environment = {"TESSERA_FRONTEND_ARGS": flags, "TESSERA_API_KEYS": key("environment")}
    with launch("agg.sh", checkpoint, folder / "log", workers=1, environment=environment) as running:
        yield running


@pytest.fixture
def as_key(service: Service) -> Iterator[Open]:
    opened: list[httpx.Client] = []

    def open_client(name: str) -> httpx.Client:
        client = httpx.Client(
            base_url=service.url, headers={"authorization": f"Bearer {key(name)}"}, timeout=30
        )
        opened.append(client)
        return client

    yield open_client
    for client in opened:
        client.close()


def metric(client: httpx.Client, name: str) -> float:
    return sum(
        float(line.rpartition(" ")[2])
        for line in client.get("/metrics").text.splitlines()
        if line.startswith(name)
    )


def computed(service: Service) -> float:
    return service.worker_metric(0, "tessera_items_total", stage="embed", outcome="ok")


def test_every_route_but_health_asks_for_a_key(service: Service, as_key: Open) -> None:
    document = as_key("open").get("/openapi.json").json()
    routes = [(method, path) for path, found in document["paths"].items() for method in found]
    routes += [("get", path) for path in ("/docs", "/openapi.json", "/redoc", "/nowhere", "/v1/models/x")]
    assert len(routes) > 14
    for method, path in routes:
        answer = httpx.request(method, f"{service.url}{path}")
        is_health = path in ("/health", "/ping", "/live", "/v1/health/ready", "/v1/health/live")
        assert answer.status_code == (200 if is_health else 401), (method, path)
        if not is_health:
            assert "API key" in answer.text
            assert answer.headers["www-authenticate"].startswith("Bearer ")
            wrong = httpx.request(method, f"{service.url}{path}", headers={"authorization": "Bearer wrong"})
            assert wrong.status_code == 401
    for headers in ({"authorization": f"Bearer {key('environment')}"}, {"x-api-key": key("open")}):
        assert httpx.get(f"{service.url}/v1/models", headers=headers).status_code == 200


def test_requests_per_minute(as_key: Open) -> None:
    client = as_key("requests")
    answers = [client.post("/tokenize", json={"prompt": "x"}) for _ in range(30)]
    assert [answer.status_code for answer in answers] == [200] * 30
    # While they were asked, one or another has become free again.
    while answers[-1].status_code == 200 and len(answers) < 90:
        answers.append(client.post("/tokenize", json={"prompt": "x"}))
    last = answers[-1]
    assert last.status_code == 429
    assert last.json()["error"]["code"] == "rate_limited"
    assert 1 <= int(last.headers["retry-after"]) <= 3
    assert client.post("/v2/embed", json={}).json().keys() == {"message"}
    assert client.get("/v1/models").status_code == 200
    assert as_key("open").post("/tokenize", json={"prompt": "x"}).status_code == 200


def test_tokens_per_minute(as_key: Open) -> None:
    client = as_key("tokens")
    # Of four minutes; they are one input to a worker.
    body = {"model": MODEL, "input": ["word " * 2000] * 40}
    assert client.post("/v1/embeddings", json=body).status_code == 200
    refused = client.post("/v1/embeddings", json={"model": MODEL, "input": "x"})
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1


def test_identical_inputs_are_answered_without_a_worker(
    service: Service, as_key: Open, photos: dict[str, bytes]
) -> None:
    client = as_key("cache")
    counted = f'tessera_result_cache_total{{model="{MODEL}",outcome="hit"}}'
    body = {"model": MODEL, "input": ["cached", {"text": "a flower", "image": data_url(photos["flower"])}]}
    first = client.post("/v1/embeddings", json=body).json()
    before, hits = computed(service), metric(client, counted)
    second = client.post("/v1/embeddings", json=body).json()
    other_form = client.post(
        "/v1/embeddings", json={"input": {"text": "cached"}, "encoding_format": "float"}
    ).json()
    assert computed(service) == before
    assert metric(client, counted) == hits + 3
    assert [row["embedding"] for row in second["data"]] == [row["embedding"] for row in first["data"]]
    assert other_form["data"][0]["embedding"] == first["data"][0]["embedding"]
    usage = second["usage"]
    assert usage["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens_details"]["image_tokens"]
    role = client.post("/v1/embeddings", json={"input": "cached", "input_type": "query"}).json()
    assert computed(service) == before + 1
    vectors = (np.array(answer["data"][0]["embedding"], np.float32) for answer in (role, first))
    assert cosine(*vectors) < 0.9999


def test_identical_inputs_at_once_are_computed_once(
    service: Service, as_key: Open, photos: dict[str, bytes]
) -> None:
    client = as_key("flight")
    before = computed(service)
    body = {"input": {"text": "at once", "image": data_url(photos["china"])}}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post("/v1/embeddings", json=body).json(), range(8)))
    assert computed(service) == before + 1
    assert all("data" in answer for answer in answers), answers
    assert len({tuple(answer["data"][0]["embedding"]) for answer in answers}) == 1


def test_what_is_cached_does_not_wait_for_a_worker_that_hangs(service: Service, as_key: Open) -> None:
    client = as_key("stopped")
    body = {"input": ["still there"]}
    first = client.post("/v1/embeddings", json=body).json()
    _, worker = service.pids()
    freeze(worker)
    try:
        again = client.post("/v1/embeddings", json=body)
        assert again.json()["data"] == first["data"]
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/embeddings", json={"input": ["not there yet"]}, timeout=0.5)
    finally:
        os.kill(worker, signal.SIGCONT)


def test_no_key_is_in_the_log(service: Service) -> None:
    log = service.log.read_text()
    assert "0123456789abcdef" not in log
    assert b"Traceback" not in service.log.read_bytes()


def test_the_log_is_readable_and_holds_no_key(service: Service, as_key: Open) -> None:
    client = as_key("open")
    answer = client.post("/v1/embeddings", json={"input": "x"}, headers={"x-request-id": "read-me"})
    assert answer.status_code == 200
    wait_for_line(service.log, " request_id=read-me ", count=2)
    written = service.log.read_text()
    lines = [line for line in written.splitlines() if "read-me" in line]
    start = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
    for role, message in (
        ("frontend", r"tessera\.frontend\.access: POST /v1/embeddings 200 request_id=read-me .* key=open "),
        ("agg", r"tessera\.worker\.access: embed ok request_id=read-me "),
    ):
        assert len([line for line in lines if re.match(rf"{start}{role}\[\d+\] INFO {message}", line)]) == 1
    assert len(lines) == 2
    assert not any(key(name) in written for name in (*NAMES, "environment"))
    assert "dynamo_runtime" not in "".join(line for line in written.splitlines() if " INFO " in line)
