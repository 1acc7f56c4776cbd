"""Small limits on a real service: what is refused, with which words, and that it recovers."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.e2e.service import MODEL, Service, launch
from tests.signals import freeze
from tests.waiting import wait_until

pytestmark = pytest.mark.service

LIMITS = (
    "--max-body-mb 0.5 --max-inputs 8 --max-images 4 --max-tokens 400 --max-file-size-mb 0.1 "
    "--max-image-pixels 1000000 --request-timeout-seconds 15 --worker-wait-seconds 0.5"
)
# Room for a handful of short texts; a batch holds one.
ENGINE = """
text: {max_batch_cost: 512, max_queue_cost: 2048}
vision: {max_batch_cost: 2, max_queue_cost: 4}
"""


@pytest.fixture(scope="module")
def service(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("limits")
    config = folder / "engine.yaml"
    config.write_text(ENGINE)
    environment = {"TESSERA_FRONTEND_ARGS": LIMITS, "TESSERA_AGG_ENGINE_ARGS": str(config)}
    with launch("agg.sh", checkpoint, folder / "log", workers=1, environment=environment) as running:
        yield running


def test_the_log_says_what_was_given_and_what_was_chosen(service: Service) -> None:
    log = service.log.read_text()
    assert re.search(
        r"^tessera: this host: .*\d+ cores?, \d+ GiB: 1 frontend, 1 agg worker$", log, re.MULTILINE
    )
    (line,) = re.findall(r"\d+ cores and [\d.]+ GiB: .*", log)
    for said in (
        r" image decoders, ",
        r"vision 2 units \(given\) a batch and 4 \(given\) waiting, ",
        r"text 512 tokens \(given\) a batch and 2,048 \(given\) waiting, ",
        r"cache of vision rows [\d.]+ GiB$",
    ):
        assert re.search(said, line), line


def url(pixels: tuple[int, int], *, noise: bool = False, seed: int = 0) -> str:
    width, height = pixels
    made = Image.new("RGB", pixels, (seed % 256, seed // 256, 0))
    if noise:
        made = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))
    buffer = io.BytesIO()
    made.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def image(source: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": source}}]


def post(service: Service, value: Any = "hello", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "input": value} | fields
    return httpx.post(f"{service.url}/v1/embeddings", json=body, timeout=60)


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """OpenAI's error object, checked for its shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["type"] and body["error"]["code"]
    found: dict[str, Any] = body["error"]
    return found


def test_a_body_that_is_too_large_by_its_own_account(service: Service) -> None:
    assert "the 524288 bytes" in error(post(service, "x" * (600 << 10)), 413)["message"]


def test_a_body_that_does_not_say_how_large_it_is(service: Service) -> None:
    def endless() -> Iterator[bytes]:
        yield b'{"input": "'
        for _ in range(100):
            yield b"x" * 16384
        yield b'"}'

    response = httpx.post(f"{service.url}/v1/embeddings", content=endless(), timeout=60)
    assert "the 524288 bytes" in error(response, 413)["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b'{"input": "\xff"}'], ids=repr)
def test_a_body_that_is_not_a_request(service: Service, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    error(httpx.post(f"{service.url}/v1/embeddings", content=body, headers=headers), 400)


def test_text_that_cannot_be_written_as_utf8(service: Service) -> None:
    body = b'{"model": "tessera-random", "input": "a \\ud800 b"}'
    found = error(httpx.post(f"{service.url}/v1/embeddings", content=body), 400)
    assert found["param"] == "input" and "half of a surrogate pair" in found["message"]
    partial = b'{"input": ["ok", "x\\ud83d", "\xff", [7, 8]], "partial": true}'
    answer = httpx.post(f"{service.url}/v1/embeddings", content=partial)
    rows = answer.raise_for_status().json()["data"]
    assert [row["embedding"] is None for row in rows] == [False, True, True, False]
    assert [row["error"]["param"] for row in rows[1:3]] == ["input[1]", "input[2]"]


def test_an_unknown_model(service: Service) -> None:
    found = error(httpx.post(f"{service.url}/v1/embeddings", json={"model": "gpt", "input": "a"}), 404)
    assert found["param"] == "model" and "gpt" in found["message"]


def test_an_unknown_route(service: Service) -> None:
    error(httpx.get(f"{service.url}/v1/nothing"), 404)


def test_too_many_inputs(service: Service) -> None:
    assert "at most 8 inputs, found 9" in error(post(service, ["a"] * 9), 400)["message"]
    assert post(service, ["a"] * 8).status_code == 200


def test_too_many_images(service: Service) -> None:
    one = image(url((8, 8)))
    found = error(post(service, [one * 5]), 400)
    assert "hold 4 images" in found["message"] and found["param"] == "input[0]"
    # The one that is too many is named.
    assert error(post(service, [one * 3, "a text", one * 2]), 400)["param"] == "input[2]"


def test_too_many_tokens_name_the_input(service: Service) -> None:
    long = "word " * 500
    found = error(post(service, ["short", long]), 400)
    assert found["param"].startswith("input[1]") and "400" in found["message"]


def test_too_many_tokens_are_cut_on_request(service: Service) -> None:
    answer = post(service, ["short", "word " * 500], truncate="END")
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"]) == 2
    assert 400 <= answer.json()["usage"]["prompt_tokens"] < 420


def test_image_bytes(service: Service) -> None:
    found = error(post(service, ["a", image(url((250, 250), noise=True))]), 413)
    assert found["param"].startswith("input[1]")


def test_image_pixels_are_counted_before_the_image_is_decoded(service: Service) -> None:
    # A few kilobytes of file that would become 75 megabytes.
    bomb = url((5000, 5000))
    assert len(bomb) < 130_000
    found = error(post(service, [image(bomb)]), 413)
    assert found["param"].startswith("input[0]")


def test_bytes_that_are_no_image(service: Service) -> None:
    source = "data:image/png;base64," + base64.b64encode(b"not an image").decode()
    assert error(post(service, [image(source)]), 415)["param"].startswith("input[0]")


async def bursts(one: Callable[[int], Awaitable[httpx.Response]], count: int) -> list[httpx.Response]:
    """Answers to ``count`` requests at once, a few times if a slow machine brings them one by one."""
    answers: list[httpx.Response] = []
    for first in range(0, 5 * count, count):
        answers += await asyncio.gather(*(one(index) for index in range(first, first + count)))
        if any(answer.status_code == 429 for answer in answers):
            break
    assert {answer.status_code for answer in answers} == {200, 429}
    return answers


async def test_a_burst_is_refused_with_when_to_come_back_and_passes(service: Service) -> None:
    text = " ".join(f"w{index}" for index in range(120))
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=200)) as client:

        async def one(index: int) -> httpx.Response:
            body = {"model": MODEL, "input": [f"{index} {text}"] * 4}
            return await client.post(f"{service.url}/v1/embeddings", json=body)

        answers = await bursts(one, 120)
    for answer in answers:
        if answer.status_code == 429:
            error(answer, 429)
            assert int(answer.headers["retry-after"]) >= 1
    # All of it is over when the last answer is out; a place is given back behind it.
    assert [post(service, f"after {index}").status_code for index in range(20)] == [200] * 20
    assert service.worker_metric(0, "tessera_queued") == 0
    wait_until(lambda: service.frontend_metric("tessera_requests_in_flight") == 0)


async def test_a_burst_of_images_is_refused_and_passes(service: Service) -> None:
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=200)) as client:

        async def one(index: int) -> httpx.Response:
            body = {"model": MODEL, "input": [image(url((16, 16), seed=index))]}
            return await client.post(f"{service.url}/v1/embeddings", json=body)

        await bursts(one, 40)
    assert post(service, [image(url((16, 16), seed=999))]).status_code == 200
    assert service.worker_metric(0, "tessera_queued") == 0


def test_a_worker_that_is_frozen_costs_no_more_than_the_deadline(service: Service) -> None:
    worker = service.pids()[1]
    freeze(worker)
    try:
        answer = post(service)
        assert answer.status_code in (503, 504), answer.text
        said = error(answer, answer.status_code)["message"]
        assert answer.status_code == 503 or said == "the request took longer than 15 s"
    finally:
        os.kill(worker, signal.SIGCONT)
    service.wait_workers(1, 0)
    assert post(service).status_code == 200


async def test_work_that_a_frozen_worker_had_begun_ends_with_504(service: Service) -> None:
    worker = service.pids()[1]
    text = " ".join(f"x{index}" for index in range(60))
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"model": MODEL, "input": [text] * 8}
        calls = [
            asyncio.ensure_future(client.post(f"{service.url}/v1/embeddings", json=body)) for _ in range(2)
        ]
        await asyncio.sleep(0.05)
        freeze(worker)
        try:
            answers = await asyncio.gather(*calls)
        finally:
            os.kill(worker, signal.SIGCONT)
    # Whatever had been answered before the freeze is an answer.
    assert {answer.status_code for answer in answers} <= {200, 429, 503, 504}
    service.wait_workers(1, 0)
    assert post(service).status_code == 200


def test_without_a_worker_it_says_so(service: Service) -> None:
    # Last: the script starts the worker again only after a moment.
    os.kill(service.pids()[1], signal.SIGKILL)
    answer = post(service)
    found = error(answer, 503)
    assert "embed worker" in found["message"] or "instance" in found["message"]
    assert int(answer.headers["retry-after"]) >= 1
    wait_until(lambda: post(service).status_code == 200)


def test_text_needs_no_encode_worker(checkpoint: Path, tmp_path: Path) -> None:
    none, brief = {"TESSERA_ENCODE_WORKERS": "0"}, ["--encode-wait-seconds", "2"]
    log = tmp_path / "log"
    with launch("e_p.sh", checkpoint, log, workers=1, arguments=brief, environment=none) as service:
        assert post(service, ["text", "more text"]).status_code == 200
        answer = post(service, ["text", image(url((8, 8)))])
        assert "no encode worker" in error(answer, 503)["message"]
        assert int(answer.headers["retry-after"]) >= 1
        health = service.health()
        assert health["images"] is False and health["workers"] == {"embed": 1, "encode": 0}
