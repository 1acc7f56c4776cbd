"""What clients of an unmodified ``dynamo.frontend`` get: what clients of our own get, in its shapes."""

from __future__ import annotations

import base64
import socket
import zlib
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.e2e.disaggregated import Disaggregated
from tests.e2e.inputs import cosine, picture
from tests.e2e.service import MODEL

pytestmark = [
    pytest.mark.xdist_group("shared-service"),
    pytest.mark.service,
    pytest.mark.installs,
    pytest.mark.timeout(600),
]

ENCODE, EMBED = 0, 1


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def embed(stock: httpx.Client, value: Any, model: str = MODEL, **options: Any) -> list[list[float]]:
    answer = stock.post("/v1/embeddings", json={"model": model, "input": value, **options})
    assert answer.status_code == 200, answer.text
    rows = answer.json()["data"]
    assert [row["index"] for row in rows] == list(range(len(rows)))
    return [row["embedding"] for row in rows]


def same(found: list[list[float]], expected: list[list[float]]) -> bool:
    pairs = zip(np.array(found), np.array(expected), strict=True)
    return all(cosine(one, other) >= 0.9999 for one, other in pairs)


def test_texts_and_token_ids(service: Disaggregated, stock: httpx.Client) -> None:
    texts = ["a short text", "another one", "text about data:image/png, which is no image"]
    assert same(embed(stock, texts), service.embed(*texts))
    assert same(embed(stock, texts[0]), service.embed(texts[0]))
    assert same(embed(stock, [5, 6, 7]), service.embed([5, 6, 7]))
    assert same(embed(stock, [[5, 6, 7], [8]]), service.embed([5, 6, 7], [8]))


def test_the_models_other_names_say_which_side_an_input_is_on(
    service: Disaggregated, stock: httpx.Client
) -> None:
    text = "which side am I on"
    query, passage = embed(stock, text, f"{MODEL}-query"), embed(stock, text, f"{MODEL}-passage")
    assert same(query, service.embed(text, input_type="query"))
    assert same(passage, service.embed(text, input_type="passage"))
    assert not same(query, passage)


def test_images_in_strings_go_through_the_encoder(service: Disaggregated, stock: httpx.Client) -> None:
    first, second = data_url(picture(9401)), data_url(picture(9402))
    encoded = service.running.worker_metric(ENCODE, "tessera_items_total", stage="encode", outcome="ok")
    found = embed(stock, [first, second, f"what is this? {first}", "no image"])
    after = service.running.worker_metric(ENCODE, "tessera_items_total", stage="encode", outcome="ok")
    assert after == encoded + 2
    assert not same(found[:1], found[1:2]) and not same(found[:1], found[2:3])
    assert same(found, service.embed(first, second, f"what is this? {first}", "no image"))
    # Both ways in share the worker's cache.
    assert after == service.running.worker_metric(ENCODE, "tessera_items_total", stage="encode", outcome="ok")


def test_the_openai_client_works_unchanged(service: Disaggregated, stock: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{stock.base_url}/v1", api_key="none", max_retries=0) as client:
        # It asks for base64 by itself.
        answer = client.embeddings.create(model=MODEL, input=["a short text", data_url(picture(9403))])
        numbers = client.embeddings.create(model=MODEL, input="a short text", encoding_format="float")
    assert same([row.embedding for row in answer.data][:1], service.embed("a short text"))
    assert same([numbers.data[0].embedding], service.embed("a short text"))
    assert np.linalg.norm(answer.data[1].embedding) == pytest.approx(1.0, abs=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 64


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"input": ""}, 400, "input: expected text"),
        ({"input": []}, 400, "input: expected at least one input"),
        ({"input": ["fine", ""]}, 400, "input[1]: expected text"),
        ({"input": [2_000_000]}, 400, "outside the vocabulary"),
        ({"input": "text", "dimensions": 7}, 400, "dimensions 7: this model offers"),
        ({"input": ["fine", "data:image/png;base64,AAAA"]}, 415, "input[1] is no image"),
        ({"input": "data:image/png;base64,!!!!"}, 400, "input: the data URL is not valid base64"),
        ({"input": "word " * 140_000}, 400, "over the limit of"),
        ({"input": ["a"] * 8193}, 400, "at most 8192 inputs"),
    ],
)
def test_errors_keep_their_status_and_name_the_input(
    stock: httpx.Client, body: dict[str, Any], status: int, text: str
) -> None:
    answer = stock.post("/v1/embeddings", json={"model": MODEL, **body})
    assert answer.status_code == status, answer.text
    assert text in answer.json()["message"]
    # The frontend leaves workers alone that failed it; a client's mistake is no failure.
    assert embed(stock, "still there")


def test_an_image_over_the_limit_of_pixels_is_not_decoded(stock: httpx.Client) -> None:
    # Its header alone says how large it would become.
    head = b"IHDR" + (20_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    png = b"\x89PNG\r\n\x1a\n\x00\x00\x00\r" + head + zlib.crc32(head).to_bytes(4, "big")
    answer = stock.post("/v1/embeddings", json={"model": MODEL, "input": data_url(png + picture(1)[33:])})
    assert answer.status_code == 413, answer.text
    assert answer.json()["message"].startswith("input")


def test_a_broken_image_fails_in_the_decoder_and_not_the_worker(stock: httpx.Client) -> None:
    answer = stock.post("/v1/embeddings", json={"model": MODEL, "input": data_url(picture(9404)[:400])})
    assert answer.status_code in (400, 415), answer.text
    assert answer.json()["message"].startswith("input")
    assert embed(stock, "still there")


def test_web_addresses_are_text_and_nobody_is_asked(service: Disaggregated, stock: httpx.Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/picture.png"
        assert same(embed(stock, url), service.embed(url))
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_what_came_this_way_is_counted_and_logged(service: Disaggregated, stock: httpx.Client) -> None:
    def count(**labels: str) -> float:
        return service.running.worker_metric(EMBED, "tessera_requests_total", route="dynamo", **labels)

    good, bad = count(status="200"), count(status="400")
    embed(stock, "one to count")
    stock.post("/v1/embeddings", json={"model": MODEL, "input": ""})
    assert (count(status="200"), count(status="400")) == (good + 1, bad + 1)
    assert b"Traceback" not in service.running.log.read_bytes()
