"""Clients of rerankers against a running reranker, and against a model of vectors."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from typing import Any

import cohere
import httpx
import numpy as np
import pytest
import requests
import voyageai
from cohere.errors import BadRequestError, NotFoundError, UnauthorizedError
from voyageai.api_resources.api_requestor import _thread_context
from voyageai.error import AuthenticationError, InvalidRequestError

from tests.clients.conftest import ClosedService
from tests.e2e.inputs import cosine, data_url
from tests.e2e.service import MODEL
from tests.references.llama_nemotron_vl import Reference

pytestmark = pytest.mark.service

QUERY = "a red flower"
DOCUMENTS = ["a meadow", "the river is long", "a flower, red as it can be", "nothing of the kind"]
LONG = "word " * 20_000


@pytest.fixture
def ask(reranker: ClosedService) -> Iterator[httpx.Client]:
    with reranker.http() as client:
        yield client


@pytest.fixture
def wire() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client


@pytest.fixture
def voyage(reranker: ClosedService, monkeypatch: pytest.MonkeyPatch) -> Iterator[voyageai.Client]:
    # The package keeps its connection in the thread and closes it only when it is old.
    with requests.Session() as session:
        session.trust_env = False
        monkeypatch.setattr(_thread_context, "session", session, raising=False)
        monkeypatch.setattr(_thread_context, "session_create_time", time.time(), raising=False)
        yield voyageai.Client(api_key=reranker.key, base_url=f"{reranker.url}/v1")


def logits(ask: httpx.Client, documents: Any = DOCUMENTS, query: Any = QUERY) -> list[float]:
    """Each pair's logit, of a request of its own."""
    bodies = ({"queries": query, "documents": [one], "use_activation": False} for one in documents)
    answers = [ask.post("/v1/score", json=body) for body in bodies]
    assert {answer.status_code for answer in answers} == {200}, answers[0].text
    return [answer.json()["data"][0]["score"] for answer in answers]


def ranked(values: list[float]) -> list[tuple[int, float]]:
    return sorted(enumerate(values), key=lambda row: -row[1])


def same(found: list[tuple[int, float]], wanted: list[tuple[int, float]]) -> None:
    assert [index for index, _ in found] == [index for index, _ in wanted]
    assert [score for _, score in found] == pytest.approx([score for _, score in wanted], abs=1e-4)


def probabilities(ask: httpx.Client) -> list[tuple[int, float]]:
    return ranked([1 / (1 + np.exp(-logit)) for logit in logits(ask)])


def test_cohere(ask: httpx.Client, reranker: ClosedService, wire: httpx.Client) -> None:
    wanted = probabilities(ask)
    # Else nothing would be said of the order.
    assert wanted != sorted(wanted)
    two = cohere.ClientV2(api_key=reranker.key, base_url=reranker.url, httpx_client=wire)
    answer = two.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS)
    same([(row.index, row.relevance_score) for row in answer.results], wanted)
    assert answer.meta is not None and answer.meta.billed_units is not None
    assert answer.meta.billed_units.search_units == 1
    assert answer.meta.tokens is not None and answer.meta.tokens.input_tokens > 20
    few = two.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=2, max_tokens_per_doc=4096)
    same([(row.index, row.relevance_score) for row in few.results], wanted[:2])
    one = cohere.Client(api_key=reranker.key, base_url=reranker.url, httpx_client=wire)
    objects = [{"text": text, "title": "t"} for text in DOCUMENTS]
    first = one.rerank(model=MODEL, query=QUERY, documents=objects, return_documents=True, top_n=3)
    same([(row.index, row.relevance_score) for row in first.results], wanted[:3])
    assert [row.document.text for row in first.results if row.document] == [
        DOCUMENTS[index] for index, _ in wanted[:3]
    ]
    named = one.rerank(
        model=MODEL, query=QUERY, documents=[{"a": text} for text in DOCUMENTS], rank_fields=["a"]
    )
    same([(row.index, row.relevance_score) for row in named.results], wanted)
    assert two.rerank(model=MODEL, query=QUERY, documents=[LONG, "b"]).results
    with pytest.raises(BadRequestError) as bad:
        two.rerank(model=MODEL, query=QUERY, documents=["a", ""])
    assert "documents[1]" in bad.value.body["message"]
    with pytest.raises(NotFoundError):
        two.rerank(model="another", query=QUERY, documents=DOCUMENTS)
    with pytest.raises(UnauthorizedError) as unknown:
        cohere.ClientV2(api_key="sk-wrong-0123456789", base_url=reranker.url, httpx_client=wire).rerank(
            model=MODEL, query=QUERY, documents=DOCUMENTS
        )
    assert "key" in unknown.value.body["message"]


def test_voyage(ask: httpx.Client, voyage: voyageai.Client, reranker: ClosedService) -> None:
    wanted = probabilities(ask)
    answer = voyage.rerank(QUERY, DOCUMENTS, model=MODEL)
    same([(row.index, row.relevance_score) for row in answer.results], wanted)
    assert [row.document for row in answer.results] == [DOCUMENTS[index] for index, _ in wanted]
    assert answer.total_tokens > 20
    few = voyage.rerank(QUERY, DOCUMENTS, model=MODEL, top_k=1)
    same([(row.index, row.relevance_score) for row in few.results], wanted[:1])
    assert voyage.rerank(QUERY, [LONG], model=MODEL).results
    with pytest.raises(InvalidRequestError, match="documents"):
        voyage.rerank(QUERY, [LONG], model=MODEL, truncation=False)
    with pytest.raises(AuthenticationError):
        voyageai.Client(api_key="sk-wrong-0123456789", base_url=f"{reranker.url}/v1").rerank(
            QUERY, DOCUMENTS, model=MODEL
        )
    body = {"query": QUERY, "documents": DOCUMENTS, "top_k": 2, "return_documents": True}
    for path in ("/v1/rerank", "/rerank"):
        rows = ask.post(path, json=body).json()["data"]
        assert [row["document"] for row in rows] == [DOCUMENTS[index] for index, _ in wanted[:2]]


def test_tei(ask: httpx.Client) -> None:
    body = {"query": QUERY, "texts": DOCUMENTS}
    answer = ask.post("/rerank", json=body)
    wanted = probabilities(ask)
    same([(row["index"], row["score"]) for row in answer.json()], wanted)
    for path in ("/", "/invocations"):
        rows = ask.post(path, json=body).json()
        same([(row["index"], row["score"]) for row in rows], wanted)
        refused = ask.post(path, json={"inputs": "a"})
        assert (refused.status_code, refused.json().get("error_type")) == (422, "Validation"), refused.text
        assert httpx.post(ask.base_url.join(path), json=body).status_code == 401
    assert "text" not in answer.json()[0] and int(answer.headers["x-compute-tokens"]) > 20
    raw = ask.post("/rerank", json=body | {"raw_scores": True, "return_text": True}).json()
    same([(row["index"], row["score"]) for row in raw], ranked(logits(ask)))
    assert {row["index"]: row["text"] for row in raw} == dict(enumerate(DOCUMENTS))
    long = {"query": QUERY, "texts": [LONG]}
    for direction in ("Left", "Right"):
        cut = ask.post("/rerank", json=long | {"truncate": True, "truncation_direction": direction})
        assert cut.status_code == 200, cut.text
    for wrong, status, kind in (
        (long, 422, "Validation"),
        ({"query": QUERY, "texts": []}, 400, "Empty"),
        ({"query": QUERY, "texts": ["a"] * 2000}, 422, "Validation"),
        ({"query": QUERY, "texts": [{"image": "x"}]}, 422, "Validation"),
        (body | {"colour": "red"}, 422, "Validation"),
    ):
        refused = ask.post("/rerank", json=wrong)
        assert (refused.status_code, refused.json().get("error_type")) == (status, kind), refused.text
        assert isinstance(refused.json()["error"], str)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_the_form_that_several_share(path: str, ask: httpx.Client) -> None:
    wanted = probabilities(ask)
    nulls = dict.fromkeys(("top_n", "return_documents", "max_tokens_per_doc", "rank_fields", "model"))
    answer = ask.post(path, json={"query": QUERY, "documents": DOCUMENTS, **nulls}).json()
    same([(row["index"], row["relevance_score"]) for row in answer["results"]], wanted)
    assert all(row.keys() == {"index", "relevance_score"} for row in answer["results"])
    assert (answer["object"], answer["model"]) == ("rerank", MODEL)
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 20
    raw = ask.post(path, json={"query": QUERY, "documents": DOCUMENTS, "raw_scores": True, "top_n": 1})
    same([(row["index"], row["relevance_score"]) for row in raw.json()["results"]], ranked(logits(ask))[:1])
    refused = ask.post(path, json={"query": QUERY, "documents": []})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "documents"
    assert refused.json()["message"] == refused.json()["detail"] == refused.json()["error"]["message"]
    many = ask.post(path, json={"query": QUERY, "documents": ["a"] * 1001})
    assert (many.status_code, many.json()["error"]["param"]) == (400, "documents")
    long = {"query": QUERY, "documents": ["a", LONG], "truncate": "NONE"}
    assert ask.post(path, json=long).json()["error"]["param"].startswith("documents[1]")


def test_vllm(ask: httpx.Client) -> None:
    wanted = logits(ask)
    for path in ("/score", "/v1/score"):
        both = {"text_1": QUERY, "text_2": DOCUMENTS, "model": MODEL}
        answer = ask.post(path, json=both).json()
        assert [row["index"] for row in answer["data"]] == [0, 1, 2, 3]
        assert [row["score"] for row in answer["data"]] == pytest.approx(
            [1 / (1 + np.exp(-logit)) for logit in wanted], abs=1e-4
        )
        each = {"data_1": [QUERY] * 4, "data_2": DOCUMENTS, "use_activation": False}
        assert [row["score"] for row in ask.post(path, json=each).json()["data"]] == pytest.approx(
            wanted, abs=1e-4
        )
        for wrong in (
            {"queries": ["a", "b"], "documents": ["a", "b", "c"]},
            {"queries": "a", "text_2": "b"},
            {"text_1": QUERY, "text_2": LONG},
        ):
            refused = ask.post(path, json=wrong)
            assert refused.status_code == 400
            assert refused.json().keys() == {"error"}
    cut = {"text_1": QUERY, "text_2": LONG, "truncate_prompt_tokens": -1}
    assert ask.post("/score", json=cut).status_code == 200


def test_nim(ask: httpx.Client) -> None:
    wanted = ranked(logits(ask))
    passages = [{"text": text} for text in DOCUMENTS]
    body = {"model": MODEL, "query": {"text": QUERY}, "passages": passages}
    named = body | {"model": "org/some.model"}
    for path, asked in (
        ("/v1/ranking", body),
        (f"/v1/retrieval/{MODEL}/reranking", body),
        ("/v1/ranking", named),
        ("/v1/retrieval/org/some_model/reranking", named),
        ("/v1/retrieval/org/some.model/reranking", named),
    ):
        answer = ask.post(path, json=asked)
        assert answer.status_code == 200, answer.text
        same([(row["index"], row["logit"]) for row in answer.json()["rankings"]], wanted)
        assert answer.json()["usage"]["total_tokens"] > 20
        assert len(ask.post(path, json=asked | {"top_k": 2}).json()["rankings"]) == 2
        refused = ask.post(path, json=asked | {"top_n": 2})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_n")
        assert "top_n" in refused.json()["detail"]
    other = ask.post("/v1/retrieval/org/another/reranking", json=body)
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    long = body | {"passages": [{"text": LONG}]}
    assert ask.post("/v1/ranking", json=long).json()["error"]["param"].startswith("passages[0]")
    assert ask.post("/v1/ranking", json=long | {"truncate": "END"}).status_code == 200


def test_one_picture_in_every_form(ask: httpx.Client, photos: dict[str, bytes]) -> None:
    url = data_url(photos["flower"])
    bare = base64.b64encode(photos["flower"]).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    documents: list[Any] = [{"image": url}, {"image": bare}, {"content": [part]}]
    both = {"content": [part, {"type": "text", "text": "a flower"}]}
    alone, *others, with_text, text = logits(ask, [*documents, both, "a flower"])
    assert others == pytest.approx([alone] * 2, abs=1e-4)
    assert min(abs(alone - with_text), abs(text - with_text), abs(alone - text)) > 1e-2
    passages = [{"image": url}, {"text": "", "image": bare}, {"text": "a flower", "image": url}]
    answer = ask.post("/v1/ranking", json={"query": {"text": QUERY}, "passages": passages}).json()
    found = {row["index"]: row["logit"] for row in answer["rankings"]}
    assert [found[index] for index in range(3)] == pytest.approx([alone, alone, with_text], abs=1e-4)
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    shared = {"query": QUERY, "documents": [documents[0]], "return_documents": True, "raw_scores": True}
    (row,) = ask.post("/v1/rerank", json=shared).json()["results"]
    assert row["relevance_score"] == pytest.approx(alone, abs=1e-4)
    assert row["document"] == documents[0]
    pictured = ask.post("/score", json={"queries": {"image": url}, "items": ["a flower", "a meadow"]})
    assert len({row["score"] for row in pictured.json()["data"]}) == 2


def test_a_reranker_has_no_vectors(ask: httpx.Client) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v2/embed", {"texts": ["a"]}),
        ("/embed", {"inputs": "a"}),
        ("/v1/multimodalembeddings", {"inputs": [{"content": [{"type": "text", "text": "a"}]}]}),
    ):
        answer = ask.post(path, json=body)
        assert answer.status_code == 404 and "score as its output" in answer.text, answer.text
    (card, *_) = ask.get("/v1/models").json()["data"]
    assert card["output"]["kind"] == "score"


def test_a_model_of_vectors_answers_by_cosine(http: httpx.Client, reference: Reference) -> None:
    query = reference.vector(QUERY, [], "query")
    wanted = ranked([cosine(reference.vector(text, [], "passage"), query) for text in DOCUMENTS])
    results = http.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    same([(row["index"], row["relevance_score"]) for row in results], wanted)
    rows = http.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}).json()
    same([(row["index"], row["score"]) for row in rows], wanted)
    scores = http.post("/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()["data"]
    same(ranked([row["score"] for row in scores]), wanted)
    body = {"query": {"text": QUERY}, "passages": [{"text": "a"}]}
    for path in ("/v1/ranking", f"/v1/retrieval/{MODEL}/reranking"):
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unsupported_route")
        assert "vector as its output" in answer.json()["detail"]


def test_vllms_pooling_scores_whole_prompts(ask: httpx.Client) -> None:
    prompts = [f"question:{QUERY} \n \n passage:{document}" for document in DOCUMENTS]
    raw = ask.post("/pooling", json={"input": prompts, "task": "classify", "use_activation": False})
    wanted = logits(ask)
    found = [row["data"] for row in raw.json()["data"]]
    assert found == [[pytest.approx(logit, abs=1e-4)] for logit in wanted]
    chances = [row["data"][0] for row in ask.post("/pooling", json={"input": prompts}).json()["data"]]
    assert chances == pytest.approx([1 / (1 + np.exp(-logit)) for logit in wanted], abs=1e-5)
    refused = ask.post("/pooling", json={"input": prompts, "task": "embed"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "task")
    card = ask.get("/v1/models").json()["data"][0]
    assert (card["output"]["kind"], card["task"]) == ("score", "classify")
    assert {"/v1/rerank", "/v1/ranking", "/score", "/pooling", "/invocations"} <= set(card["routes"])
    assert not {"/v1/embeddings", "/embed", "/embed_all"} & set(card["routes"])
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    assert ask.get("/info").json()["model_type"] == {"reranker": labels}
