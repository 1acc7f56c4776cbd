"""Token vectors and a reranker's scores in a program are those of a service."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tessera import Embedder, Ranked
from tessera.errors import UnsupportedRoute
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.qwen3 import COL_TINY, VL_RERANK_TINY
from tests.e2e.several import Several, several

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("python"), pytest.mark.usefixtures("forks")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    write_checkpoint(folder / "late", COL_TINY, seed=0)
    write_checkpoint(folder / "reranker", VL_RERANK_TINY, seed=0)
    return {name: folder / name for name in ("late", "reranker")}


@pytest.fixture(scope="module")
def models(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    with several(tmp_path_factory.mktemp("service"), checkpoints) as running:
        yield running


def url_of(data: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"


def ranking(models: Several, name: str, photo: bytes, **options: object) -> dict[int, float]:
    answer = models.post(
        "/v1/rerank",
        model=name,
        query={"text": "a flower", "image": url_of(photo)},
        documents=["a text", {"image": url_of(photo)}, "word " * 3000, *["a text"] * 9],
        **options,
    )
    return {result["index"]: result["relevance_score"] for result in answer.json()["results"]}


def reranked(embedder: Embedder, photo: bytes, **options: bool) -> list[Ranked]:
    documents = ["a text", photo, "word " * 3000, *["a text"] * 9]
    return embedder.rerank({"text": "a flower", "image": photo}, documents, **options)  # type: ignore[arg-type]


def test_token_vectors_and_max_sim(
    models: Several, checkpoints: dict[str, Path], photos: dict[str, bytes]
) -> None:
    with Embedder(checkpoints["late"]) as embedder:
        inputs = ["a text", photos["flower"], {"text": "a caption", "image": photos["china"]}, *["b"] * 9]
        vectors = embedder.embed(inputs, role="query")
        sent = [
            "a text",
            {"image": url_of(photos["flower"])},
            {"text": "a caption", "image": url_of(photos["china"])},
            *["b"] * 9,
        ]
        answer = models.post("/v1/embeddings", model="late", input=sent, input_type="query").json()
        assert isinstance(vectors, list) and len(vectors) == len(inputs)
        for own, row in zip(vectors, answer["data"], strict=True):
            wanted = np.array(row["embedding"], np.float32)
            assert own.dtype == np.float32 and own.shape == wanted.shape == (len(own), embedder.model.width)
            assert (own * wanted).sum(axis=1).min() >= 0.9999
        scores = {result.index: result.score for result in reranked(embedder, photos["flower"])}
    assert scores == pytest.approx(ranking(models, "late", photos["flower"]), rel=1e-3)


def test_a_rerankers_probabilities_and_logits(
    models: Several, checkpoints: dict[str, Path], photos: dict[str, bytes]
) -> None:
    with Embedder(checkpoints["reranker"]) as reranker:
        for options in ({}, {"logits": True}):
            results = reranked(reranker, photos["flower"], **options)
            sent = {"use_activation": False} if options else {}
            wanted = ranking(models, "reranker", photos["flower"], **sent)
            assert {result.index: result.score for result in results} == pytest.approx(wanted, rel=1e-3)
            scores = [result.score for result in results]
            assert scores == sorted(scores, reverse=True)
        with pytest.raises(UnsupportedRoute, match="gives scores of pairs, and no vectors: use rerank"):
            reranker.embed(["a text"])
