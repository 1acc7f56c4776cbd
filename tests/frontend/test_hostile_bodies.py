"""Bodies of millions of small values, sent to a frontend as a process: refused, and nobody is held up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.frontend.alone import Alone, frontend_process

pytestmark = pytest.mark.service

MANY = 20 << 20
LISTS = {
    "/v1/embeddings": b'{"input": [%s]}',
    "/v2/embed": b'{"texts": [%s]}',
    "/v1/multimodalembeddings": b'{"inputs": [%s]}',
    "/embed": b'{"inputs": [%s]}',
    "/tokenize": b'{"prompt": "a", "modality": [%s]}',
    "/v1/rerank": b'{"query": "a", "documents": [%s]}',
    "/score": b'{"text_1": "a", "text_2": [%s]}',
    "/v2/models/m/infer": b'{"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": [%s]}]}',
    "/v2/repository/index": b'{"ready": [%s]}',
}
"""What each client's form has a list in."""


@pytest.fixture(scope="module")
def alone(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    with frontend_process(checkpoint, tmp_path_factory.mktemp("bodies")) as running:
        yield running


def post(alone: Alone, path: str, body: bytes) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return alone.http.post(path, content=body, headers=headers, timeout=120)


def beside(alone: Alone, work: Callable[[], httpx.Response]) -> httpx.Response:
    """Do it while ``/live`` is asked again and again, each time with an answer before the client gives up."""
    done, failures = threading.Event(), []

    def probe() -> None:
        with httpx.Client(base_url=alone.http.base_url, timeout=10) as client:
            while not done.is_set():
                try:
                    assert client.get("/live").status_code == 200
                except Exception as error:
                    failures.append(error)
                    return

    prober = threading.Thread(target=probe)
    prober.start()
    try:
        return work()
    finally:
        done.set()
        prober.join()
        assert not failures


@pytest.mark.parametrize("item", [b"[]", b"{}", b'{"a":1}'])
def test_millions_of_lists_take_neither_time_nor_memory(alone: Alone, item: bytes) -> None:
    count = MANY * 3 // (len(item) + 1)
    body = LISTS["/v1/embeddings"] % b",".join([item] * count)
    before = alone.forget_peak()
    answer = beside(alone, lambda: post(alone, "/v1/embeddings", body))
    assert answer.status_code == 400
    assert "more than 200000 lists and objects" in answer.json()["error"]["message"]
    # The body is there twice, while it is put together.
    assert alone.peak_bytes - before < 4 * len(body)


@pytest.mark.parametrize("path", LISTS)
def test_every_route_counts_before_it_parses(alone: Alone, path: str) -> None:
    body = LISTS[path] % b",".join([b"[]"] * 200_001)
    answer = post(alone, path, body)
    assert answer.status_code in (400, 422) and "more than 200000 lists and objects" in answer.text
    few = post(alone, path, LISTS[path] % b",".join([b"[]"] * 199_000))
    assert "lists and objects" not in few.text


@pytest.mark.parametrize("item", [b'""', b"1"])
def test_millions_of_other_values_are_counted_before_each_is_looked_at(alone: Alone, item: bytes) -> None:
    body = LISTS["/v1/embeddings"] % b",".join([item] * MANY)
    answer = beside(alone, lambda: post(alone, "/v1/embeddings", body))
    assert answer.status_code == 400 and "at most" in answer.json()["error"]["message"]


def test_a_string_that_is_no_text_is_named_by_every_form(alone: Alone) -> None:
    for path, body in LISTS.items():
        for fault in (b'"x\\ud83d"', b'"\xff"'):
            answer = post(alone, path, body % (b'"ok", ' + fault))
            assert answer.status_code in (400, 422)
            assert "[1]: a string that is no text" in answer.text, (path, answer.text)
