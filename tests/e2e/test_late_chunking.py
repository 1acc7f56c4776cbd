"""Chunks of documents in one pass, and texts longer than the model: the published all-MiniLM-L6-v2.

The definitions are over transformers' own states: the mean of a chunk's tokens by the offsets of its text in
the whole, and vLLM's mean of runs.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import requests
import torch
import voyageai
from voyageai.api_resources.api_requestor import _thread_context

from tests import minilm
from tests.e2e.service import MODEL, Service, launch, post
from tests.references.encoder import EncoderReference

pytestmark = pytest.mark.service

Array = npt.NDArray[np.float32]

BERLIN = [
    "Berlin is the capital of Germany.",
    " It has more than 3.85 million inhabitants.",
    " The city is also a state of the country.",
]
QUERY = "Berlin population"
LIMIT, MOST = 256, 1200
LONG = " ".join(
    f"Sentence {number} is about rivers, temples and bridge {number * 7}." for number in range(62)
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("log") / "agg"
    given = {"TESSERA_MAX_EMBED_TOKENS": str(MOST), "TESSERA_FRONTEND_ARGS": "--result-cache-mb 16"}
    with launch("agg.sh", minilm.directory(), log, workers=1, environment=given) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> EncoderReference:
    return EncoderReference(minilm.directory())


@torch.no_grad()
def states(reference: EncoderReference, ids: list[int]) -> Array:
    hidden: Array = reference.model(**reference.arguments(ids)).last_hidden_state[0].numpy()
    return hidden


def unit(rows: Array) -> Array:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def defined(reference: EncoderReference, chunks: Sequence[str]) -> tuple[Array, Array, list[list[int]]]:
    """Return each chunk's vector, the states of the whole, and each chunk's tokens, by their offsets."""
    encoding = reference.tokenizer.encode("".join(chunks))
    hidden, ends = states(reference, encoding.ids), np.cumsum([0, *map(len, chunks)])
    spans = [
        [
            token
            for token, (start, stop) in enumerate(encoding.offsets)
            if start < stop and first <= start and stop <= last
        ]
        for first, last in pairwise(ends)
    ]
    return unit(np.stack([hidden[span].mean(0) for span in spans])), hidden, spans


def embedded(service: Service, **body: Any) -> Array:
    answer = post(service, **body)
    assert answer.status_code == 200, answer.text
    return np.array([row["embedding"] for row in answer.json()["data"]], np.float32)


def test_chunks_have_the_figures_that_others_found(service: Service) -> None:
    (query,) = embedded(service, input=QUERY)
    alone = embedded(service, input=BERLIN) @ query
    late = embedded(service, input=BERLIN, late_chunking=True) @ query
    np.testing.assert_allclose(alone, (0.715, 0.330, 0.133), atol=6e-4)
    np.testing.assert_allclose(late, (0.700, 0.656, 0.701), atol=6e-4)


# Asked twice: the second answer is the cache's.
@pytest.mark.parametrize("time", ["computed", "cached"])
def test_chunks_are_means_of_the_states_of_their_tokens(
    service: Service, reference: EncoderReference, time: str
) -> None:
    expected, hidden, spans = defined(reference, BERLIN)
    answer = post(service, input=BERLIN, late_chunking=True).json()
    assert [row["index"] for row in answer["data"]] == [0, 1, 2]
    found = np.array([row["embedding"] for row in answer["data"]], np.float32)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == len(hidden)
    # Mistakes would show.
    last = len(hidden) - 1
    wrong = {
        "alone": embedded(service, input=BERLIN),
        "control tokens": [hidden[[0, *spans[0]]], hidden[spans[1]], hidden[[*spans[2], last]]],
        "off by one": [hidden[np.array(span) - 1] for span in spans],
    }
    for name, rows in wrong.items():
        vectors = rows if name == "alone" else unit(np.stack([part.mean(0) for part in rows]))
        assert np.abs(found - vectors).max() > 5e-3, name


def test_sentence_transformers_token_embeddings_have_the_same_means(service: Service) -> None:
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(minilm.directory()), device="cpu")
    (hidden,) = model.encode(["".join(BERLIN)], output_value="token_embeddings")
    lengths = [len(model.tokenizer.tokenize(chunk)) for chunk in BERLIN]
    bounds = 1 + np.cumsum([0, *lengths])
    assert bounds[-1] + 1 == len(hidden)
    spans = pairwise(bounds)
    expected = unit(np.stack([hidden[first:last].numpy().mean(0) for first, last in spans]))
    found = embedded(service, input=BERLIN, late_chunking=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_company_changes_nothing(service: Service, reference: EncoderReference) -> None:
    documents = [
        [f"Document {number} is of bridges.", f" It has {number} rivers." * number] for number in range(1, 9)
    ]

    def ask(chunks: list[str]) -> tuple[Array, Array]:
        whole = embedded(service, input="".join(chunks))
        return embedded(service, input=chunks, late_chunking=True), whole

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, documents))
    for chunks, (found, whole) in zip(documents, answers, strict=True):
        np.testing.assert_allclose(found, defined(reference, chunks)[0], atol=1e-5)
        np.testing.assert_allclose(whole[0], reference.vector(reference.tokens("".join(chunks))), atol=1e-5)


def test_the_options_of_jinas_clients(service: Service, reference: EncoderReference) -> None:
    expected, hidden, spans = defined(reference, BERLIN)
    body = {
        "input": [{"text": chunk} for chunk in BERLIN],
        "late_chunking": True,
        "task": "retrieval.passage",
    }
    coded = post(service, **body, encoding_format="base64", truncate=True).json()["data"]
    found = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in coded]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    raw = embedded(service, **body, normalized=False)
    np.testing.assert_allclose(raw, [hidden[span].mean(0) for span in spans], atol=1e-4)
    packed = embedded(service, **body, embedding_type="binary")
    assert packed.shape == (3, 384 // 8)
    np.testing.assert_array_equal(
        embedded(service, **body, late_chunking_params=None), embedded(service, **body)
    )


def test_a_document_that_is_too_long_is_cut_where_that_leaves_a_token_of_each_chunk(service: Service) -> None:
    chunks = ["the river", " under the bridge" * 150]
    refused = post(service, input=chunks, late_chunking=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert len(embedded(service, input=chunks, late_chunking=True, truncate="END")) == 2
    for more, truncate, param in (([" a market"], "END", "input[2]"), ([], "START", "input[0]")):
        refused = post(service, input=[*chunks, *more], late_chunking=True, truncate=truncate)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", "  "]}, "input[1]"),
        ({"input": ["a", [5, 6]]}, "input[1]"),
        ({"input": ["a", "data:image/png;base64,iVBORw0KGgo="]}, "input[1]"),
        ({"input": ["a", {"role": "query", "content": "b"}]}, "input[1]"),
        ({"messages": [{"role": "user", "content": "a"}]}, "late_chunking"),
        ({"input": ["a"], "partial": True}, "late_chunking"),
        ({"input": ["a"], "return_multivector": True}, "late_chunking"),
        ({"input": ["a"], "output_types": ["dense"]}, "late_chunking"),
        ({"input": ["a"], "late_chunking": "yes"}, "late_chunking"),
    ],
)
def test_refusals_name_the_field(service: Service, body: dict[str, Any], param: str) -> None:
    refused = post(service, **{"late_chunking": True, **body})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_the_model_says_that_it_can(service: Service) -> None:
    (card,) = httpx.get(f"{service.url}/v1/models").json()["data"]
    assert card["late_chunking"] is True and [output["name"] for output in card["outputs"]] == ["dense"]


@pytest.fixture
def voyage(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[voyageai.Client]:
    with requests.Session() as session:
        session.trust_env = False
        monkeypatch.setattr(_thread_context, "session", session, raising=False)
        monkeypatch.setattr(_thread_context, "session_create_time", time.time(), raising=False)
        yield voyageai.Client(api_key="none", base_url=f"{service.url}/v1")


def test_voyages_client_gets_a_list_for_each_document(
    voyage: voyageai.Client, reference: EncoderReference
) -> None:
    documents = [BERLIN, ["A river."], BERLIN[1:]]
    answer = voyage.contextualized_embed(documents, model=MODEL, input_type="document")
    assert [result.index for result in answer.results] == [0, 1, 2]
    for chunks, result in zip(documents, answer.results, strict=True):
        np.testing.assert_allclose(result.embeddings, defined(reference, chunks)[0], atol=1e-5)
        assert result.chunk_texts is None
    assert answer.total_tokens == sum(len(reference.tokens("".join(chunks))) for chunks in documents)
    query = voyage.contextualized_embed([[QUERY]], model=MODEL, input_type="query", output_dtype="int8")
    assert all(isinstance(value, int) for value in query.results[0].embeddings[0])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"inputs": ["a"]}, "inputs[0]"),
        ({"inputs": [[]]}, "inputs[0]"),
        ({"inputs": [["a"], ["b", ""]]}, "inputs[1][1]"),
        ({"inputs": [["a"], ["b", " "]]}, "inputs[1][1]"),
        ({"inputs": [["a"], ["b " * 300]]}, "inputs[1]"),
        ({"inputs": [["a"], [7]]}, "inputs[1][0]"),
        ({"inputs": [["a"] * 8000, ["b"] * 200]}, "inputs[1]"),
        ({"inputs": [["a"]], "enable_auto_chunking": True}, "enable_auto_chunking"),
        ({"inputs": [["a"]], "chunk_size": 8}, "chunk_size"),
        ({"inputs": [["a"]], "output_dimension": 7}, "output_dimension"),
    ],
)
def test_voyages_errors_name_the_field(service: Service, body: dict[str, Any], param: str) -> None:
    refused = post(service, "/v1/contextualizedembeddings", **body)
    assert refused.status_code == 400 and refused.json()["detail"].startswith(param), refused.text


def runs_of(reference: EncoderReference, text: str) -> list[list[int]]:
    ids = reference.tokens(text)
    return [ids[first : first + LIMIT] for first in range(0, len(ids), LIMIT)]


def test_a_longer_text_is_the_mean_of_its_runs(service: Service, reference: EncoderReference) -> None:
    runs = runs_of(reference, LONG)
    assert len(runs) > 2 and len(runs[-1]) < LIMIT
    sizes = np.array(list(map(len, runs)), np.float32)[:, None]
    vectors = np.stack([reference.vector(run) for run in runs])
    answer = post(service, input=["a river", LONG]).json()
    short, found = (np.array(row["embedding"], np.float32) for row in answer["data"])
    np.testing.assert_allclose(short, reference.vector(reference.tokens("a river")), atol=1e-5)
    np.testing.assert_allclose(found, unit((sizes * vectors).sum(0)), atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == sizes.sum() + len(reference.tokens("a river"))
    # Mistakes would show.
    first, last = runs[0][:1], runs[-1][-1:]
    each = [[*first, *run, *last] for run in (runs[0][1:], *runs[1:-1], runs[-1][:-1])]
    own = unit((sizes * np.stack([reference.vector(run) for run in each])).sum(0))
    for name, wrong in (
        ("own control tokens", own),
        ("unweighted", unit(vectors.sum(0))),
        ("cut", vectors[0]),
    ):
        assert np.abs(found - wrong).max() > 2e-3, name
    # Without lengths of 1 it is the mean of all states.
    (raw,) = embedded(service, input=LONG, normalize=False)
    means = np.stack([states(reference, run).mean(0) for run in runs])
    np.testing.assert_allclose(raw, (sizes * means).sum(0) / sizes.sum(), atol=1e-4)


def test_longer_texts_are_cut_where_that_is_asked_and_refused_beyond_the_limit(
    service: Service, reference: EncoderReference
) -> None:
    (cut,) = embedded(service, input=LONG, truncate="END")
    ids = reference.tokens(LONG)
    np.testing.assert_allclose(cut, reference.vector([*ids[: LIMIT - 1], ids[-1]]), atol=1e-5)
    refused = post(service, input=["a", LONG * 3])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[1]")
    assert f"limit of {MOST}" in refused.json()["error"]["message"]
    ids = reference.tokenizer.encode(LONG, add_special_tokens=False).ids
    found = embedded(service, input=[ids])
    runs = [ids[first : first + LIMIT] for first in range(0, len(ids), LIMIT)]
    weighted = sum(len(run) * reference.vector(run) for run in runs)
    np.testing.assert_allclose(found[0], unit(np.asarray(weighted)), atol=1e-5)
