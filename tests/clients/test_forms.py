"""Every form of input and every option, through a running service."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from tests.clients.conftest import ClosedService
from tests.e2e.disaggregated import OTHER_NAME
from tests.e2e.inputs import cosine, data_url, parts
from tests.e2e.service import MODEL
from tests.references.llama_nemotron_vl import Reference

pytestmark = pytest.mark.service


def vectors(http: httpx.Client, **body: Any) -> npt.NDArray[np.float32]:
    answer = http.post("/v1/embeddings", json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [row["index"] for row in data] == list(range(len(data)))
    return np.array([row["embedding"] for row in data], np.float32)


@pytest.fixture(scope="module")
def url(photos: dict[str, bytes]) -> str:
    return data_url(photos["flower"])


def test_every_form_of_one_input_gives_the_same_vector(
    http: httpx.Client, url: str, photos: dict[str, bytes], reference: Reference
) -> None:
    text = "a red flower"
    content = parts(text, photos["flower"])
    inline = url.partition(",")[2]
    message = {"role": "user", "content": content}
    forms: dict[str, dict[str, Any]] = {
        "NIM, new line": {"input": f"{text}\n{url}"},
        "NIM, space": {"input": [f"{text} {url}"], "modality": "text_image"},
        "NIM, modality of each": {"input": [f"{text} {url}"], "modality": ["text_image"]},
        "vLLM messages": {"messages": [message]},
        "vLLM batch": {"messages": [[message], [message]]},
        "vLLM messages in input": {"input": [message]},
        "vLLM batch in input": {"input": [[message], [message]]},
        "vLLM with uuid": {
            "messages": [{"role": "user", "content": [content[0] | {"uuid": "f"}, content[1]]}]
        },
        "object": {"input": {"text": text, "image": url}},
        "objects": {"input": [{"text": text, "image": inline}]},
        "parts": {"input": content},
        "batched parts": {"input": [content, content]},
        "input_image": {
            "input": [[{"type": "input_text", "text": text}, {"type": "input_image", "image_url": url}]]
        },
        "Voyage part": {
            "input": [[{"type": "text", "text": text}, {"type": "image_base64", "image_base64": url}]]
        },
        "Cohere item": {"input": [{"content": content}]},
    }
    expected = reference.vector(text, [photos["flower"]], "passage")
    for name, body in forms.items():
        for row in vectors(http, **body):
            assert cosine(row, expected) >= 0.9999, name


def test_a_uuid_alone_is_answered_from_the_cache(
    service: ClosedService, http: httpx.Client, url: str, photos: dict[str, bytes], reference: Reference
) -> None:
    def content(payload: str | None, uuid: str) -> list[dict[str, Any]]:
        image = payload and {"url": payload}
        return [{"type": "image_url", "image_url": image, "uuid": uuid}, {"type": "text", "text": "a flower"}]

    def ask(client: httpx.Client, *parts: Any) -> httpx.Response:
        return client.post("/v1/embeddings", json={"messages": [{"role": "user", "content": list(parts)}]})

    expected = reference.vector("a flower", [photos["flower"]], "passage")
    unknown = ask(http, *content(None, "flower-1"))
    assert unknown.status_code == 422
    error = unknown.json()["error"]
    assert (error["code"], error["param"]) == ("media_not_cached", "messages[0].content[0].image_url")
    sent = ask(http, *content(url, "flower-1"))
    named = ask(http, *content(None, "flower-1"))
    for answer in (sent, named):
        assert cosine(np.array(answer.json()["data"][0]["embedding"], np.float32), expected) >= 0.9999
    usage = named.json()["usage"]["prompt_tokens_details"]
    assert usage["cached_tokens"] == usage["image_tokens"] > 0
    # Another key's name for it is unknown, however well it is guessed.
    with httpx.Client(
        base_url=service.url, headers={"x-api-key": "sk-other-0123456789"}, timeout=60
    ) as other:
        assert ask(other, *content(None, "flower-1")).status_code == 422
        assert ask(other, *content(data_url(photos["china"]), "flower-1")).status_code == 200
    again = ask(http, *content(None, "flower-1")).json()["data"][0]["embedding"]
    assert cosine(np.array(again, np.float32), expected) >= 0.9999
    # The payload decides, and the name then stands for it.
    ask(http, *content(data_url(photos["china"]), "flower-1"))
    moved = ask(http, *content(None, "flower-1")).json()["data"][0]["embedding"]
    china = reference.vector("a flower", [photos["china"]], "passage")
    assert cosine(np.array(moved, np.float32), china) >= 0.9999


def test_mixed_kinds_in_one_request(http: httpx.Client, url: str, reference: Reference) -> None:
    token_ids = reference.tokens("plain", [], "none")
    rows = vectors(
        http,
        input=[
            "plain",
            url,
            token_ids,
            {"text": "plain"},
            [{"type": "text", "text": "plain"}],
            {"image": url},
        ],
    )
    plain = reference.vector("plain", [], "none")
    for index in (0, 2, 3, 4):
        assert cosine(rows[index], plain) >= 0.9999, index
    assert cosine(rows[1], rows[5]) >= 0.9999
    assert cosine(rows[0], rows[1]) < 0.999


def test_roles(http: httpx.Client, reference: Reference) -> None:
    query, passage = (reference.vector("hello", [], role) for role in ("query", "passage"))
    for body in ({"input_type": "query"}, {"task": "retrieval.query"}, {"model": f"{MODEL}-query"}):
        assert cosine(vectors(http, **{"input": "hello", **body})[0], query) >= 0.9999, body
    for body in ({"input_type": "passage"}, {"input_type": "document"}, {"model": f"{MODEL}-passage"}):
        assert cosine(vectors(http, **{"input": "hello", **body})[0], passage) >= 0.9999, body
    message = [{"role": "query", "content": "hello"}]
    assert cosine(vectors(http, messages=message)[0], query) >= 0.9999


DTYPES = {
    "float32": ("<f4", 1),
    "float16": ("<f2", 1),
    "bfloat16": ("<u2", 1),
    "int8": ("i1", 1),
    "uint8": ("u1", 1),
    "binary": ("i1", 8),
    "ubinary": ("u1", 8),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("field", ["embed_dtype", "embedding_type", "output_dtype"])
def test_dtypes_in_every_encoding(http: httpx.Client, dtype: str, field: str) -> None:
    # One input alone: two may meet in a batch or not, and differ in their last bits.
    plain = vectors(http, input="a")
    body = {"model": MODEL, "input": "a", field: dtype}
    code, pack = DTYPES[dtype]
    listed = http.post("/v1/embeddings", json=body).json()["data"]
    coded = http.post("/v1/embeddings", json=body | {"encoding_format": "base64"}).json()["data"]
    raw = http.post("/v1/embeddings", json=body | {"encoding_format": "bytes"})
    width = plain.shape[1] // pack
    assert all(len(row["embedding"]) == width for row in listed)
    assert raw.content == b"".join(base64.b64decode(row["embedding"]) for row in coded)
    both = http.post("/v1/embeddings", json=body | {"input": ["a", "b"], "encoding_format": "bytes"})
    assert json.loads(both.headers["metadata"])["shape"] == [2, width]
    assert len(both.content) == 2 * len(raw.content)
    values = np.frombuffer(raw.content, code).reshape(1, width)
    if dtype == "bfloat16":
        values = (values.astype("<u4") << 16).view("<f4")
    np.testing.assert_array_equal(np.array([row["embedding"] for row in listed], values.dtype), values)
    if pack == 1:
        restored = values.astype(np.float32) - (128 if dtype == "uint8" else 0)
        assert min(cosine(*pair) for pair in zip(restored, plain, strict=True)) > 0.999


def test_truncation(http: httpx.Client, reference: Reference) -> None:
    long = "word " * 40
    whole = http.post("/tokenize", json={"prompt": long}).json()["tokens"]
    assert whole == reference.tokens(long, [], "none")
    cut = http.post("/tokenize", json={"prompt": long, "truncate_prompt_tokens": 9}).json()["tokens"]
    assert cut == whole[:9]
    tail = http.post(
        "/tokenize", json={"prompt": long, "truncate_prompt_tokens": 9, "truncation_side": "left"}
    ).json()["tokens"]
    assert tail == [whole[0], *whole[-8:]]
    assert (
        cosine(vectors(http, input=long, truncate_prompt_tokens=9)[0], vectors(http, input=[whole[:9]])[0])
        >= 0.9999
    )
    assert len(vectors(http, input="word " * 20_000, truncate="START")) == 1
    refused = http.post("/v1/embeddings", json={"input": ["short", "word " * 20_000], "truncate": "NONE"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input[1]"


def test_partial_answers_keep_the_good_rows(http: httpx.Client) -> None:
    body = {"input": ["good", {"image": "aGVsbG8="}, "also good", [999_999_999]], "partial": True}
    answer = http.post("/v1/embeddings", json=body).json()
    good, image, other, ids = answer["data"]
    assert len(good["embedding"]) == len(other["embedding"]) > 0
    assert image["embedding"] is None
    assert image["error"]["code"] == "unsupported_media"
    assert image["error"]["param"] == "input[1].image"
    assert ids["error"]["param"].startswith("input[3]")
    whole = http.post("/v1/embeddings", json=body | {"partial": False})
    assert whole.status_code == 415
    assert whole.json()["error"]["param"] == "input[1].image"


def test_inputs_that_cannot_be_read_are_bad_rows_too(http: httpx.Client) -> None:
    bad: list[Any] = ["", None, [], {"text": "x", "picture": "y"}, [1, -1], {"image": 5}]
    inputs = [entry for one in bad for entry in (one, "good")]
    answer = http.post("/v1/embeddings", json={"input": inputs, "partial": True}).json()
    (good,) = vectors(http, input=["good"])
    for index, row in enumerate(answer["data"]):
        assert row["index"] == index
        if index % 2:
            np.testing.assert_allclose(row["embedding"], good, atol=1e-5)
        else:
            assert row["embedding"] is None
            assert row["error"]["param"].startswith(f"input[{index}]")
            assert row["error"]["code"] == "invalid_input"
            alone = http.post("/v1/embeddings", json={"input": inputs})
            assert (alone.status_code, alone.json()["error"]["param"]) == (400, "input[0]")
    message = {"role": "user", "content": "good"}
    batch = {"messages": [[message], [], "text", [message | {"name": "x"}], [message]], "partial": True}
    rows = http.post("/v1/embeddings", json=batch).json()["data"]
    assert [row["embedding"] is not None for row in rows] == [True, False, False, False, True]
    assert rows[3]["error"]["param"] == "messages[3][0].name"
    # What is wrong with the request as a whole has no row.
    assert http.post("/v1/embeddings", json={"input": ["x"], "partial": True, "colour": 1}).status_code == 400


def test_accepted_and_inert(http: httpx.Client) -> None:
    plain = vectors(http, input="x")
    for body in (
        {"user": "somebody"},
        {"priority": -5},
        {"normalize": True},
        {"use_activation": True},
        {"add_special_tokens": True},
        {"mm_processor_kwargs": None},
        {"dimensions": plain.shape[1]},
    ):
        np.testing.assert_allclose(vectors(http, input="x", **body), plain, atol=1e-6)


def test_widths_that_the_checkpoint_offers(http: httpx.Client, url: str) -> None:
    inputs = ["plain", {"text": "a flower", "image": url}]
    whole = vectors(http, input=inputs, normalize=False)
    cut = whole[:, :64]
    unit = cut / np.linalg.norm(cut, axis=1, keepdims=True)
    for field in ("dimensions", "output_dimension"):
        np.testing.assert_allclose(vectors(http, input=inputs, **{field: 64}), unit, atol=1e-4)
    as_pooled = vectors(http, input=inputs, dimensions=64, normalize=False)
    np.testing.assert_allclose(as_pooled, cut, atol=2e-4 * np.linalg.norm(whole))
    for path, body in (
        ("/v2/embed", {"texts": ["plain"], "output_dimension": 64}),
        (
            "/v1/multimodalembeddings",
            {"inputs": [{"content": [{"type": "text", "text": "plain"}]}], "output_dimension": 64},
        ),
        ("/embed", {"inputs": ["plain"], "dimensions": 64}),
    ):
        answer = http.post(path, json=body).json()
        match path:
            case "/v2/embed":
                (row,) = answer["embeddings"]["float"]
            case "/embed":
                (row,) = answer
            case _:
                row = answer["data"][0]["embedding"]
        np.testing.assert_allclose(row, unit[0], atol=1e-4, err_msg=path)


def test_widths_that_the_service_allows_beside_the_checkpoints(http: httpx.Client) -> None:
    whole = vectors(http, input="plain", normalize=False)
    for width in (96, 101):
        cut = whole[:, :width]
        unit = cut / np.linalg.norm(cut, axis=1, keepdims=True)
        np.testing.assert_allclose(vectors(http, input="plain", dimensions=width), unit, atol=1e-4)
    offered = [[32, 32], [64, 64], [96, 96], [100, 104], [whole.shape[1], whole.shape[1]]]
    for path in (f"/v1/models/{MODEL}", "/status"):
        assert http.get(path).json()["output"]["dimensions"] == offered


def test_every_name_of_the_model_is_accepted_and_answers_say_the_first(http: httpx.Client) -> None:
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == [MODEL, OTHER_NAME]
    assert http.get(f"/v1/models/{OTHER_NAME}").json()["id"] == OTHER_NAME
    status = http.get("/status").json()
    assert (status["model"], status["names"]) == (MODEL, [MODEL, OTHER_NAME])
    query = vectors(http, input="plain", input_type="query")
    assert http.get(f"/v1/models/{OTHER_NAME.upper()}").json()["id"] == OTHER_NAME
    for name, vector in (
        (MODEL, query),
        (f"{OTHER_NAME}-query", query),
        (f"{OTHER_NAME.upper()}-query", query),
    ):
        answer = http.post("/v1/embeddings", json={"model": name, "input": "plain", "input_type": "query"})
        assert answer.json()["model"] == MODEL
        np.testing.assert_allclose(answer.json()["data"][0]["embedding"], vector[0], atol=1e-6)
    for path, body in (
        ("/v2/embed", {"texts": ["x"]}),
        ("/v1/multimodalembeddings", {"inputs": [{"content": [{"type": "text", "text": "x"}]}]}),
        ("/tokenize", {"prompt": "x"}),
    ):
        for name in (OTHER_NAME, OTHER_NAME.title()):
            assert http.post(path, json=body | {"model": name}).status_code == 200, path
        answer = http.post(path, json=body | {"model": "neither"})
        assert answer.status_code == 404
        assert (
            f"'neither' is not served here, '{MODEL}', '{OTHER_NAME}' are (--served-model-name adds names)"
            in answer.text
        )


def test_images_are_what_their_bytes_say(
    service: ClosedService, http: httpx.Client, url: str, photos: dict[str, bytes], reference: Reference
) -> None:
    (service.media / "flower.png").write_bytes(photos["flower"])
    (service.media / "page.jpg").write_bytes(b"<!doctype html><script>alert(1)</script>")
    expected = reference.vector(None, [photos["flower"]], "passage")
    named = url.replace("image/jpeg", "image/png"), url.replace("image/jpeg", "text/html")
    for source in (*named, f"file://{service.media}/flower.png"):
        assert cosine(vectors(http, input=[{"image": source}])[0], expected) >= 0.9999, source[:40]
    refused = http.post("/v1/embeddings", json={"input": [{"image": f"file://{service.media}/page.jpg"}]})
    assert refused.status_code == 415


@pytest.mark.parametrize("field", ["normalize", "normalized", "use_activation"])
def test_vectors_as_they_were_pooled(
    http: httpx.Client, reference: Reference, photos: dict[str, bytes], url: str, field: str
) -> None:
    inputs = ["plain", {"text": "a flower", "image": url}]
    found = vectors(http, input=inputs, **{field: False})
    expected = [
        reference.vector("plain", [], "none", normalize=False),
        reference.vector("a flower", [photos["flower"]], "passage", normalize=False),
    ]
    for vector, pooled in zip(found, expected, strict=True):
        np.testing.assert_allclose(vector, pooled, atol=2e-4 * np.linalg.norm(pooled))
    unit = vectors(http, input=inputs)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1.0, atol=1e-5)
    assert np.abs(np.linalg.norm(found, axis=1) - 1).min() > 0.1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x", "inputs": "y"}, "inputs"),
        ({"input": [{"text": "x", "picture": "y"}]}, "input[0].picture"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]},
            "messages[0].content[0].txt",
        ),
        ({"input": "x", "dimensions": 7}, "dimensions"),
        ({"input": "x", "output_dimension": 7}, "output_dimension"),
        ({"input": "x", "chat_template": "{{x}}"}, "chat_template"),
        ({"input": []}, "input"),
        ({}, "input"),
    ],
)
def test_what_is_not_understood_is_named(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_widths_that_are_not_offered_are_told_which_are(http: httpx.Client) -> None:
    hidden = vectors(http, input="x").shape[1]
    for asked in (hidden - 1, hidden + 1):
        answer = http.post("/v1/embeddings", json={"input": "x", "dimensions": asked})
        assert answer.status_code == 400
        offered = f"dimensions {asked}: this model offers 32, 64, 96, 100 to 104, {hidden}"
        assert offered in answer.json()["error"]["message"]
    for path, body in (
        ("/v2/embed", {"texts": ["x"]}),
        ("/v1/multimodalembeddings", {"inputs": [{"content": [{"type": "text", "text": "x"}]}]}),
    ):
        answer = http.post(path, json=body | {"output_dimension": 7})
        assert answer.status_code == 400
        assert "output_dimension 7: this model offers" in answer.text


def test_request_ids_and_timings(http: httpx.Client, url: str) -> None:
    answer = http.post(
        "/v1/embeddings", json={"input": url}, headers={"x-request-id": "mine-1", "x-tessera-timings": "1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "embd-mine-1"
    assert {f"x-tessera-{name}-ms" for name in ("queue", "preprocess", "encode", "transfer", "embed")} <= set(
        answer.headers
    )
    failed = http.post("/v1/embeddings", content=b"{", headers={"x-request-id": "mine-2"})
    assert (failed.status_code, failed.headers["x-request-id"]) == (400, "mine-2")
    forged = http.post("/v1/embeddings", json={"input": "x"}, headers={"x-request-id": "a b"})
    assert forged.headers["x-request-id"] not in ("", "a b")
    assert len(http.get("/nowhere").headers["x-request-id"]) == 32
