"""Bodies of millions of small values, sent to a frontend as a process: refused, and nobody is held up."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
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
    "/v2/models/router/infer": b'{"inputs": [{"name": "x", "datatype": "BYTES", "shape": [], "data": [%s]}]}',
}
"""What each client's form has a list in."""


@pytest.fixture(scope="module")
def alone(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    flags = ("--kserve-shared-memory", "tessera-bodies")
    with frontend_process(checkpoint, tmp_path_factory.mktemp("bodies"), *flags, watched=True) as running:
        yield running


def post(alone: Alone, path: str, body: bytes) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return alone.http.post(path, content=body, headers=headers, timeout=120)


def posted(alone: Alone, body: bytes, path: str = "/v1/embeddings") -> httpx.Response:
    """Post it; the event loop never stands for long meanwhile."""
    for _ in alone.tries():
        answer = post(alone, path, body)
    return answer


EMBED, INFER = "/v1/embeddings", "/v2/models/router/infer"


@pytest.mark.parametrize(
    ("path", "item", "most"),
    [
        (EMBED, b"[]", "200000 lists and objects"),
        (EMBED, b"{}", "200000 lists and objects"),
        (EMBED, b'{"a":1}', "200000 lists and objects"),
        (INFER, b"[]", "200000 lists and objects"),
        (EMBED, b'""', "4200000 values"),
        (EMBED, b"1", "4200000 values"),
        ("/v1/rerank", b'""', "4200000 values"),
    ],
)
def test_millions_of_values_take_neither_time_nor_memory(
    alone: Alone, path: str, item: bytes, most: str
) -> None:
    count = min(MANY, MANY * 3 // (len(item) + 1))
    body = LISTS[path] % b",".join([item] * count)
    before = alone.forget_peak()
    answer = posted(alone, body, path)
    assert answer.status_code == 400 and f"more than {most}" in answer.text
    # The body is there twice, while it is put together.
    assert alone.peak_bytes - before < 4 * len(body)


def test_every_route_counts_before_it_parses(alone: Alone) -> None:
    """Whatever their forms name; those that the model does not answer refuse a body unread."""
    paths = alone.http.get("/openapi.json").json()["paths"]
    paths = [path for path, methods in paths.items() if "post" in methods]
    assert set(LISTS) - {INFER} <= set(paths)
    refused = 0
    for path in [*paths, INFER]:
        answer = post(alone, path, b'{"a": [%s]}' % b",".join([b"[]"] * 200_001))
        if answer.status_code == 404:
            refused += 1
            continue
        assert answer.status_code in (400, 422), path
        assert "more than 200000 lists and objects" in answer.text, (path, answer.text)
        few = post(alone, path, b'{"a": [%s]}' % b",".join([b"[]"] * 199_000))
        assert "lists and objects" not in few.text, path
    assert refused <= 4


def test_token_ids_at_their_limits_are_read(alone: Alone) -> None:
    """Each is taken for what it is: there are 2,026 tokens, and workers are none."""
    row = b"[%s]" % b",".join([b"2025"] * 512)
    for last, expected in (
        (b"2026", "input[8191][0] is 2026, outside the vocabulary"),
        (b"1", "no embed worker"),
    ):
        body = b'{"input": [%s, [%s]]}' % (b",".join([row] * 8191), last)
        answer = posted(alone, body)
        assert expected in answer.text
    strings = b",".join([b'""'] * 600_002)
    answer = post(alone, "/v1/embeddings", LISTS["/v1/embeddings"] % strings)
    assert answer.status_code == 400 and "600000 values outside long lists of numbers" in answer.text


IDS = b"[%s]" % b",".join([b"[%s]" % b",".join([b"2025"] * 512)] * 8192)
NUMBERS = b'{"inputs": [{"name": "x", "datatype": "%s", "shape": [4194304], "data": [%s]}]}'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", b'{"inputs": %s}' % IDS),
        ("/pooling", b'{"input": %s}' % IDS),
        ("/v2/models/router/infer", NUMBERS % (b"INT64", b",".join([b"2025"] * (4 << 20)))),
        ("/v2/models/router/infer", NUMBERS % (b"FP32", b",".join([b"0.25"] * (4 << 20)))),
    ],
    ids=["TEI", "vLLM", "integers", "floats"],
)
def test_what_is_as_large_as_may_be_keeps_nobody_waiting(alone: Alone, path: str, body: bytes) -> None:
    """Whatever becomes of it: there are no workers, and the model takes no numbers."""
    assert posted(alone, body, path).status_code in (400, 503)


def test_tokens_are_written_beside_the_event_loop(alone: Alone) -> None:
    """As many as a body may have, and as many as texts of a megabyte have in TEI's form."""
    ids = b"[%s]" % b",".join([b"2025"] * 512)
    answer = posted(alone, b'{"input": [%s]}' % b",".join([ids] * 8192), "/tokenize").json()
    assert answer["count"] == 8192 * 512 and answer["data"][8191] == {
        "index": 8191,
        "count": 512,
        "tokens": [2025] * 512,
    }
    texts = b",".join([b'"%s"' % (b"word " * 25)] * 8192)
    tokens = posted(alone, b'{"inputs": [%s]}' % texts, "/tokenize").json()
    assert len(tokens) == 8192 and tokens[8191] == tokens[0]
    assert "".join(token["text"] for token in tokens[0][1:]) == "word " * 25


def test_tokens_of_a_text_are_bounded(alone: Alone) -> None:
    """By the characters that a thread may be at, and by the bytes of an answer."""
    answer = post(alone, "/tokenize", b'{"inputs": ["a", "%s"]}' % (b"word " * 52_429))
    assert answer.status_code == 422 and "inputs[1]: expected at most 262144 characters" in answer.text


def test_many_words_that_look_like_images_are_no_work_in_proportion_to_their_square(alone: Alone) -> None:
    answer = post(alone, "/v1/embeddings", b'{"input": ["%s"]}' % (b"data:image/,a " * 280_000))
    assert answer.status_code == 400 and "16 images in one input, found 280000" in answer.text


@pytest.mark.parametrize("path", ["repository/index", "systemsharedmemory/region/a/register"])
def test_small_routes_have_small_limits(alone: Alone, path: str) -> None:
    answer = post(alone, f"/v2/{path}", b'{"ready": [%s]}' % b",".join([b"[]"] * 200_001))
    assert answer.status_code == 400 and "larger than the 65536 bytes" in answer.text


def test_a_string_that_is_no_text_is_named_by_every_form(alone: Alone) -> None:
    for path, body in (*LISTS.items(), ("/v2/repository/index", b'{"ready": [%s]}')):
        for fault in (b'"x\\ud83d"', b'"\xff"'):
            answer = post(alone, path, body % (b'"ok", ' + fault))
            assert answer.status_code in (400, 422)
            assert "[1]: a string that is no text" in answer.text, (path, answer.text)


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        (b'{"input": "a", "model": "%s"}' % (b"x" * 50_000_000), 404, "is not served here"),
        (b"\xff" * 50_000_000, 400, "the body is not valid JSON"),
        (b'{"input": "a", "x": %s}' % (b"\xff" * 50_000_000), 400, "the body is not valid JSON"),
    ],
    ids=["model", "garbage", "garbage inside"],
)
def test_one_long_thing_is_refused_at_once(alone: Alone, body: bytes, status: int, expected: str) -> None:
    answer = posted(alone, body)
    assert answer.status_code == status and expected in answer.text and len(answer.text) < 1000


@pytest.mark.parametrize("binary", [False, True])
def test_a_large_answer_of_kserve_is_written_beside_the_loop(alone: Alone, binary: bool) -> None:
    # Rows that are empty need no worker: their states are zeros.
    shape = [64, 2048]
    described = {"datatype": "INT64", "shape": shape, "parameters": {"binary_data_size": 64 * 2048 * 8}}
    inputs = [{"name": name, **described} for name in ("input_ids", "attention_mask")]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": binary}}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    body = head + bytes(2 * 64 * 2048 * 8)
    for _ in alone.tries():
        answer = alone.http.post("/v2/models/hidden/infer", content=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text[:200]
    length = int(answer.headers["inference-header-content-length"]) if binary else len(answer.content)
    (output,) = json.loads(answer.content[:length])["outputs"]
    assert output["shape"][:2] == shape
    values = np.frombuffer(answer.content[length:], np.float32) if binary else np.array(output["data"])
    assert values.size == math.prod(output["shape"]) > 4_000_000 and not values.any()
