"""The forms of requests for scores, and what is written of the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tessera import wire
from tessera.errors import InvalidInput
from tessera.frontend.api.endpoint import TranslatedScores
from tessera.frontend.request import ImageSource, RequestLimits
from tessera.frontend.serving.pipeline import Scores, Usage
from tessera.frontend.serving.served import Served
from tessera.models.base import Output, OutputKind, Role, Truncate
from tessera_apis import nim, rerank, score, tei, voyage

SERVED = Served(
    names=("org/some_model", "other"),
    limits=RequestLimits(documents=4),
    output=Output(kind=OutputKind.SCORE, width=1),
)
LOGITS = (-1.0, 40.0, 0.5, 41.0)
URL = "data:image/png;base64,AAAA"


def shared(path: str = rerank.V1, **fields: object) -> TranslatedScores:
    return rerank.parse_rerank({"query": "q", "documents": ["a", "b", "c", "d"], **fields}, SERVED, path)


def answer(translated: TranslatedScores, kind: OutputKind = OutputKind.SCORE, values: Any = LOGITS) -> Any:
    scores = Scores(
        request_id="1",
        values=np.array(values, np.float32),
        kind=kind,
        usage=Usage(text_tokens=7),
        image_pixels=0,
        timings=wire.Timings(),
    )
    return orjson.loads(translated.write(scores).content)


def order(translated: TranslatedScores) -> list[int]:
    return [row["index"] for row in answer(translated)["results"]]


def text(parts: tuple[object, ...]) -> str:
    (part,) = parts
    assert isinstance(part, str)
    return part


def test_the_best_come_first_also_where_their_probabilities_are_one() -> None:
    assert order(shared()) == [3, 1, 2, 0]
    assert [row["relevance_score"] for row in answer(shared())["results"]][:2] == [1.0, 1.0]
    assert order(shared(top_n=2)) == [3, 1]
    assert order(shared(top_n=0)) == order(shared(top_n=9)) == [3, 1, 2, 0]


def test_equal_scores_keep_their_order() -> None:
    values = [row["index"] for row in answer(shared(), values=(1.0, 2.0, 1.0, 2.0))["results"]]
    assert values == [1, 3, 0, 2]


@pytest.mark.parametrize("fields", [{"raw_scores": True}, {"use_activation": False}])
def test_logits_where_they_are_asked_for(fields: dict[str, object]) -> None:
    assert [row["relevance_score"] for row in answer(shared(**fields))["results"]] == [41.0, 40.0, 0.5, -1.0]
    low = answer(shared(raw_scores=False, use_activation=True))["results"][-1]
    assert low["relevance_score"] == pytest.approx(1 / (1 + np.e))


def test_cosines_and_max_sims_stay_what_they_are() -> None:
    for kind in (OutputKind.VECTOR, OutputKind.TOKENS):
        found = answer(shared(), kind, (-0.5, 12.25, 0.0, 1.0))["results"]
        assert [row["relevance_score"] for row in found] == [12.25, 1.0, 0.0, -0.5]


def test_far_logits_are_probabilities() -> None:
    found = answer(shared(), values=(-2e4, 2e4, -700.0, 0.0))["results"]
    assert [row["relevance_score"] for row in found] == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_documents_come_back_as_they_came() -> None:
    given = ["a", {"text": "b", "title": "t"}, {"image": URL}, {"content": [{"type": "text", "text": "d"}]}]
    assert "document" not in answer(shared(documents=given))["results"][0]
    found = answer(shared(documents=given, return_documents=True))
    by_index = {row["index"]: row["document"] for row in found["results"]}
    assert by_index == {0: {"text": "a"}, 1: given[1], 2: given[2], 3: given[3]}
    # litellm reads Voyage's key where it could not say that it means Voyage.
    assert found["data"] == found["results"]
    assert "data" not in answer(shared(rerank.V2))
    assert [answer(shared(path))["meta"]["api_version"]["version"] for path in (rerank.V1, rerank.V2)] == [
        *("1", "2")
    ]


def test_texts_images_and_fields() -> None:
    request = shared(
        query={"image": URL},
        documents=[
            "data:image/png;base64,AAAA",
            {"image": "/9j/AAAA", "text": "a"},
            {"content": [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "b"}]},
            {"text": "c", "title": "not ranked by"},
        ],
    ).request
    assert [entry.role for entry in request.queries] == [Role.QUERY]
    assert {entry.role for entry in request.documents} == {Role.PASSAGE}
    assert [len(entry.images) for entry in (*request.queries, *request.documents)] == [1, 0, 1, 1, 0]
    # A string is a text, whatever it holds.
    assert text(request.documents[0].parts).startswith("data:")
    assert isinstance(request.documents[2].parts[0], ImageSource)
    assert text(request.documents[3].parts) == "c"
    ranked = shared(
        documents=[{"b": "two", "a": "one", "c": "no"}, {"a": "alone"}, "text"], rank_fields=["a", "b"]
    ).request
    assert [text(entry.parts) for entry in ranked.documents] == ["one\ntwo", "alone", "text"]
    assert [entry.param for entry in ranked.documents] == ["documents[0]", "documents[1]", "documents[2]"]


def test_one_document_needs_no_list() -> None:
    assert len(shared(documents="a").request.documents) == 1
    assert len(shared(documents={"text": "a"}).request.documents) == 1


def test_options() -> None:
    assert shared(**dict.fromkeys(rerank.FORM.names - {"query", "documents"})).request == shared().request
    assert shared().request.truncate is Truncate.DECLARED
    assert shared(truncation_side="left").request.truncate is Truncate.START
    assert shared(truncate="NONE").request.truncate is Truncate.NONE
    made = shared(
        truncate_prompt_tokens=100,
        max_tokens_per_doc=4096,
        max_tokens_per_query=0,
        instruction="find",
        priority=-3,
        request_id="abc",
        model="m",
    ).request
    assert (made.max_tokens, made.max_document_tokens, made.max_query_tokens) == (100, 4096, None)
    assert (made.priority, made.request_id, made.model) == (-3, "abc", "m")
    assert [entry.instruction for entry in (*made.queries, made.documents[0])] == ["find", None]
    inert = {"max_chunks_per_doc": 1, "relevant_spans": {"mode": "disabled"}, "padding": False}
    assert shared(**inert).request == shared().request


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": None}, "query"),
        ({"query": ""}, "query"),
        ({"query": ["q"]}, "query"),
        ({"query": {"text": "q", "title": "t"}}, "query.title"),
        ({"query": {"content": "q"}}, "query.content"),
        ({"documents": None}, "documents"),
        ({"documents": []}, "documents"),
        ({"documents": ["a"] * 5}, "documents"),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"documents": ["a", 1]}, "documents[1]"),
        ({"documents": [{}]}, "documents[0]"),
        ({"documents": [{"title": "t"}]}, "documents[0].title"),
        ({"documents": [{"text": 1}]}, "documents[0].text"),
        ({"documents": [{"content": [{"type": "text", "text": "a"}], "text": None, "x": 1}]}, "documents[0]"),
        ({"documents": [{"content": [], "x": 1}]}, "documents[0].x"),
        ({"documents": [{"image": "x://y"}]}, "documents[0].image"),
        ({"documents": [{"a": "b"}], "rank_fields": ["c"]}, "documents[0]"),
        ({"documents": [{"c": 1}], "rank_fields": ["c"]}, "documents[0].c"),
        ({"rank_fields": [1]}, "rank_fields[0]"),
        ({"top_n": -1}, "top_n"),
        ({"top_n": 1.5}, "top_n"),
        ({"return_documents": "yes"}, "return_documents"),
        ({"max_chunks_per_doc": 10}, "max_chunks_per_doc"),
        ({"relevant_spans": {"mode": "enabled"}}, "relevant_spans"),
        ({"raw_scores": True, "use_activation": True}, "use_activation"),
        ({"max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"colour": "red"}, "colour"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidInput) as error:
        shared(**fields)
    assert error.value.param == param


def test_voyage() -> None:
    body = {"query": "q", "documents": ["a", {"image": URL}], "top_k": None, "truncation": True}
    plain = voyage.parse_rerank(body, SERVED)
    assert plain.request.truncate is Truncate.DECLARED
    assert answer(plain, values=(0.0, 1.0)) == {
        "object": "list",
        "data": [
            {"index": 1, "relevance_score": pytest.approx(0.7310586)},
            {"index": 0, "relevance_score": 0.5},
        ],
        "model": "org/some_model",
        "usage": {"total_tokens": 7},
    }
    asked = {"top_k": 1, "truncation": False, "return_documents": True}
    cut = voyage.parse_rerank(body | asked, SERVED)
    assert cut.request.truncate is Truncate.NONE
    (row,) = answer(cut, values=(1.0, 0.0))["data"]
    assert (row["index"], row["document"]) == (0, "a")
    for wrong in ({"top_k": 0}, {"top_n": 1}, {"documents": []}):
        with pytest.raises(InvalidInput):
            voyage.parse_rerank(body | wrong, SERVED)


def test_tei() -> None:
    body = {"query": "q", "texts": ["a", "b"]}
    assert tei.parse_rerank(body, SERVED).request.truncate is Truncate.NONE
    assert answer(tei.parse_rerank(body, SERVED), values=(0.0, 40.0)) == [
        {"index": 1, "score": 1.0},
        {"index": 0, "score": 0.5},
    ]
    asked = {"raw_scores": True, "return_text": True, "top_n": 1, "truncate": True}
    cut = tei.parse_rerank(body | asked | {"truncation_direction": "Left"}, SERVED)
    assert cut.request.truncate is Truncate.START
    assert answer(cut, values=(0.0, 40.0)) == [{"index": 1, "score": 40.0, "text": "b"}]
    for wrong in ({"texts": []}, {"texts": ["a"] * 5}, {"texts": "a"}, {"texts": [["a"]]}, {"top_k": 1}):
        with pytest.raises(InvalidInput):
            tei.parse_rerank(body | wrong, SERVED)


def test_nim() -> None:
    body = {
        "query": {"text": "q"},
        "passages": [{"text": "a"}, {"text": "", "image": "iVBORw0KGgo="}, {"text": "b", "image": URL}],
    }
    plain = nim.parse_ranking(body, SERVED)
    assert plain.request.truncate is Truncate.NONE
    assert [len(entry.images) for entry in plain.request.documents] == [0, 1, 1]
    found = answer(plain, values=(-3.0, 2.0, 1.0))
    assert found["rankings"] == [
        {"index": 1, "logit": 2.0},
        {"index": 2, "logit": 1.0},
        {"index": 0, "logit": -3.0},
    ]
    assert found["usage"]["total_tokens"] == 7
    few = nim.parse_ranking(body | {"top_k": 1, "truncate": "END"}, SERVED)
    assert few.request.truncate is Truncate.END
    assert len(answer(few, values=(-3.0, 2.0, 1.0))["rankings"]) == 1
    assert nim.parse_ranking(body | {"model": "elsewhere"}, SERVED).request.model == "elsewhere"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": "q"}, "query"),
        ({"query": {"text": ""}}, "query.text"),
        ({"query": {"text": "q", "image": URL}}, "query.image"),
        ({"passages": []}, "passages"),
        ({"passages": [{"text": "a"}] * 5}, "passages"),
        ({"passages": ["a"]}, "passages[0]"),
        ({"passages": [{"text": ""}]}, "passages[0].text"),
        ({"passages": [{"text": "a", "title": "t"}]}, "passages[0].title"),
        ({"truncate": "START"}, "truncate"),
        ({"top_n": 1}, "top_n"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_ranking_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidInput) as error:
        nim.parse_ranking({"query": {"text": "q"}, "passages": [{"text": "a"}], **fields}, SERVED)
    assert error.value.param == param


@pytest.mark.parametrize("names", score.PAIRS, ids=str)
def test_pairs(names: tuple[str, str]) -> None:
    one, other = names
    request = score.parse_score({one: "q", other: ["a", "b"]}, SERVED)
    assert (len(request.request.queries), len(request.request.documents)) == (1, 2)
    assert request.request.truncate is Truncate.NONE
    found = answer(request, values=(0.0, 40.0))
    assert found["data"] == [
        {"index": 0, "object": "score", "score": 0.5},
        {"index": 1, "object": "score", "score": 1.0},
    ]
    several = score.parse_score({one: ["p", "q"], other: ["a", {"text": "b"}]}, SERVED).request
    assert [entry.param for entry in several.queries] == [f"{one}[0]", f"{one}[1]"]
    raw = score.parse_score({one: "q", other: "a", "use_activation": False}, SERVED)
    assert answer(raw, values=(-2.5,))["data"][0]["score"] == -2.5
    for wrong in ({one: ["p", "q"]}, {one: ["p", "q"], other: "a"}, {one: "q", other: []}):
        with pytest.raises(InvalidInput):
            score.parse_score({one: "q", other: ["a", "b", "c"]} | wrong, SERVED)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text_1": "a"},
        {"text_1": "a", "data_2": "b"},
        {"queries": "a", "documents": "b", "items": "c"},
        {"text_1": "a", "text_2": "b", "top_n": 1},
    ],
    ids=str,
)
def test_other_pairs_are_refused(body: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        score.parse_score(body, SERVED)


def test_every_option_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    section = page.partition("## Scores\n")[2].partition("\n## ")[0]
    for name in (
        rerank.FORM.names | score.FORM.names | {*nim.FORM.names, *voyage.RERANK.names, *tei.RERANK.names}
    ):
        assert f"`{name}`" in section, name
