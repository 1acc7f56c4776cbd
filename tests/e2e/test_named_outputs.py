"""Dense, sparse and token vectors of one pass, over HTTP: BGE M3 behind a launch script."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from benchmarks.ports import free_ports
from openai import OpenAI
from tritonclient.utils import shared_memory

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import M3_TINY
from tests.clients.environment import clients_environment
from tests.e2e.kserve import Door, KserveClient
from tests.e2e.service import MODEL, ROOT, Service, launch, post
from tests.references.m3 import M3Reference

pytestmark = pytest.mark.service

PREFIX = "tessera-named-"
TEXTS = ["the river under the bridge", "a market by the old temple", "été naïve 東京 the the"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m3") / "checkpoint"
    write_checkpoint(path, M3_TINY, seed=7)
    return path


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def service(path: Path, grpc_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    flags = f"--grpc-port {grpc_port} --kserve-shared-memory {PREFIX}"
    with launch(
        "agg.sh",
        path,
        tmp_path_factory.mktemp("log") / "agg",
        workers=1,
        environment={"TESSERA_FRONTEND_ARGS": flags},
    ) as running:
        yield running


@pytest.fixture(params=["grpc", "http"])
def kserve(request: pytest.FixtureRequest, service: Service, grpc_port: int) -> Iterator[KserveClient]:
    door = Door(http=service.url.removeprefix("http://"), grpc=f"127.0.0.1:{grpc_port}")
    client = door.client(request.param)
    yield client
    client.close()


@pytest.fixture(scope="module")
def reference(path: Path) -> M3Reference:
    return M3Reference(path)


def check_sparse(found: dict[str, Any], expected: dict[int, float]) -> None:
    assert found["indices"] == list(expected)
    np.testing.assert_allclose(found["values"], list(expected.values()), atol=1e-5)


# Asked twice: the second answer is the cache's.
@pytest.mark.parametrize("time", ["computed", "cached"])
def test_three_outputs_of_one_call(service: Service, reference: M3Reference, time: str) -> None:
    names = ["dense", "sparse", "multi_vector"]
    answer = post(service, input=TEXTS, output_types=names, return_tokens=True).json()
    assert [row["index"] for row in answer["data"]] == [0, 1, 2]
    for text, row in zip(TEXTS, answer["data"], strict=True):
        tokens = reference.tokens(text)
        np.testing.assert_allclose(row["embedding"], reference.dense(tokens), atol=1e-5)
        check_sparse(row["sparse_embedding"], reference.weights(tokens))
        np.testing.assert_allclose(row["multi_vector"], reference.vectors(tokens), atol=1e-5)
        words = [reference.tokenizer.id_to_token(token) for token in row["sparse_embedding"]["indices"]]
        assert row["sparse_embedding"]["tokens"] == words
    assert answer["usage"]["prompt_tokens"] == sum(len(reference.tokens(text)) for text in TEXTS)


def test_openais_client_bears_it(service: Service, reference: M3Reference) -> None:
    with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        options: dict[str, Any]
        for options in ({}, {"encoding_format": "float"}):
            answer = client.embeddings.create(
                model=MODEL, input=TEXTS, extra_body={"output_types": ["sparse"]}, **options
            )
            for text, row in zip(TEXTS, answer.data, strict=True):
                assert row.embedding == []
                found: Any = row
                check_sparse(found.sparse_embedding, reference.weights(reference.tokens(text)))
        both = client.embeddings.create(model=MODEL, input=TEXTS, extra_body={"return_sparse": True})
        np.testing.assert_allclose(
            both.data[0].embedding, reference.dense(reference.tokens(TEXTS[0])), atol=1e-5
        )


def test_base64_holds_the_vectors_and_their_shape(service: Service) -> None:
    names = ["dense", "multivector"]
    plain = post(service, input=TEXTS, output_types=names).json()["data"]
    coded = post(service, input=TEXTS, output_types=names, encoding_format="base64").json()["data"]
    for row, code in zip(plain, coded, strict=True):
        dense = np.frombuffer(base64.b64decode(code["embedding"]), "<f4")
        np.testing.assert_allclose(dense, row["embedding"], atol=1e-7)
        vectors = np.frombuffer(base64.b64decode(code["multi_vector"]), "<f4").reshape(code["shape"])
        np.testing.assert_allclose(vectors, row["multi_vector"], atol=1e-7)
    raw = post(service, input=TEXTS, output_types=["multivector"], encoding_format="bytes_only")
    assert len(raw.content) == sum(4 * np.prod(code["shape"]) for code in coded)


def test_the_largest_weights_where_they_are_bounded(service: Service) -> None:
    whole = post(service, input=TEXTS, output_types=["sparse"]).json()["data"]
    few = post(service, input=TEXTS, output_types=["sparse"], max_active_dims=2).json()["data"]
    for row, cut in zip(whole, few, strict=True):
        sparse = row["sparse_embedding"]
        pairs = zip(sparse["indices"], sparse["values"], strict=True)
        kept = sorted(sorted(pairs, key=lambda pair: -pair[1])[:2])
        assert list(zip(*cut["sparse_embedding"].values(), strict=True)) == kept


def test_what_asks_for_nothing_new_sees_nothing_new(service: Service) -> None:
    plain = post(service, input=TEXTS).json()
    assert [list(row) for row in plain["data"]] == [["object", "index", "embedding"]] * 3
    for same in ({"output_types": ["dense"]}, {"return_dense": True}):
        assert post(service, input=TEXTS, **same).json()["data"] == plain["data"]


@pytest.mark.parametrize("good", [[], TEXTS[:1]], ids=["all fail", "one is good"])
def test_inputs_that_fail_have_an_error_in_place_of_all_outputs(
    service: Service, reference: M3Reference, good: list[str]
) -> None:
    names = ["dense", "sparse", "multivector"]
    answer = post(service, input=["", *good, "river " * 2000], output_types=names, partial=True).json()
    for place, row in enumerate(answer["data"]):
        if 0 < place <= len(good):
            check_sparse(row["sparse_embedding"], reference.weights(reference.tokens(TEXTS[0])))
            assert len(row["embedding"]) == 128
        else:
            assert row["embedding"] is None and row["error"]["param"] == f"input[{place}]"
            assert not {"sparse_embedding", "multi_vector"} & row.keys()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"output_types": ["colbert"]}, "output_types[0]"),
        ({"output_types": []}, "output_types"),
        ({"output_types": ["sparse"], "return_dense": True}, "output_types"),
        ({"return_dense": False}, "return_dense"),
        ({"output_types": ["sparse", "dense"], "encoding_format": "bytes"}, "encoding_format"),
        ({"output_types": ["sparse"], "max_active_dims": 0}, "max_active_dims"),
    ],
)
def test_refusals_name_the_field(service: Service, body: dict[str, Any], param: str) -> None:
    refused = post(service, input="a", **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_models_list_their_outputs(service: Service) -> None:
    (card,) = httpx.get(f"{service.url}/v1/models").json()["data"]
    assert card["late_chunking"] is False
    assert card["outputs"] == [
        {"name": "dense", "kind": "vector", "width": 128, "most": None},
        {"name": "sparse", "kind": "sparse", "width": 1, "most": None},
        {"name": "multivector", "kind": "tokens", "width": 128, "most": None},
    ]


def test_rows_are_counted_by_output(service: Service) -> None:
    def counted() -> dict[str, float]:
        text = httpx.get(f"{service.url}/metrics").text
        lines = re.findall(r'^tessera_output_rows_total\{.*output="(\w+)".*\} (\S+)$', text, re.MULTILINE)
        return {name: float(count) for name, count in lines}

    before = counted()
    tokens = post(service, input=TEXTS, output_types=["dense", "sparse"]).json()["usage"]["prompt_tokens"]
    after = counted()
    assert {name: after[name] - before[name] for name in ("dense", "sparse", "multivector")} == {
        "dense": 3,
        "sparse": tokens,
        "multivector": 0,
    }
    assert "dense,sparse" in service.log.read_text()


def test_text_embeddings_inferences_routes_give_the_same(service: Service, reference: M3Reference) -> None:
    sparse = httpx.post(f"{service.url}/embed_sparse", json={"inputs": TEXTS}, timeout=60).json()
    tokens = httpx.post(f"{service.url}/embed_all", json={"inputs": TEXTS}, timeout=60).json()
    for text, weights, vectors in zip(TEXTS, sparse, tokens, strict=True):
        given = reference.tokens(text)
        found = {
            key: [pair[of] for pair in weights] for key, of in (("indices", "index"), ("values", "value"))
        }
        check_sparse(found, reference.weights(given))
        np.testing.assert_allclose(vectors, reference.vectors(given), atol=1e-5)


def test_pooling_gives_the_output_of_a_task(service: Service, reference: M3Reference) -> None:
    given = reference.tokens(TEXTS[0])
    for task, expected in (("embed", reference.dense(given)), ("token_embed", reference.vectors(given))):
        (row,) = post(service, "/pooling", input=TEXTS[0], task=task).json()["data"]
        np.testing.assert_allclose(row["data"], expected, atol=1e-5)
    refused = post(service, "/pooling", input="a", output_types=["sparse"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "output_types")


def test_pooling_gives_the_weight_of_each_token(service: Service, reference: M3Reference) -> None:
    # The last text has a token twice: each occurrence has a weight of its own.
    found = post(service, "/pooling", input=TEXTS, task="token_classify").json()["data"]
    coded = post(service, "/pooling", input=TEXTS, task="token_classify", encoding_format="base64").json()[
        "data"
    ]
    raw = post(service, "/pooling", input=TEXTS, task="token_classify", encoding_format="bytes")
    parts = json.loads(raw.headers["metadata"])["data"]
    for text, row, code, part in zip(TEXTS, found, coded, parts, strict=True):
        tokens = reference.tokens(text)
        expected = torch.relu(reference.sparse(reference.hidden(tokens)))[1:-1, 0].detach().numpy()
        np.testing.assert_allclose(row["data"], expected, atol=1e-5)
        assert code["shape"] == part["shape"] == [len(tokens) - 2]
        np.testing.assert_allclose(
            np.frombuffer(base64.b64decode(code["data"]), "<f4"), row["data"], atol=1e-7
        )
        np.testing.assert_allclose(
            np.frombuffer(raw.content[part["start"] : part["end"]], "<f4"), row["data"], atol=1e-7
        )
        # Merged by their ids they are the sparse output.
        merged: dict[int, float] = {}
        for token, weight in zip(tokens[1:-1], row["data"], strict=True):
            if token not in reference.unused and weight > 0:
                merged[token] = max(weight, merged.get(token, 0))
        np.testing.assert_allclose(
            [merged[token] for token in sorted(merged)], list(reference.weights(tokens).values()), atol=1e-5
        )
    for body, param in (({"embed_dtype": "int8"}, "embed_dtype"), ({"late_chunking": True}, "late_chunking")):
        refused = post(service, "/pooling", input="a", task="token_classify", **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_model_that_pools_its_first_token_has_no_chunks(service: Service) -> None:
    refused = post(service, input=TEXTS, late_chunking=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "late_chunking")
    refused = post(service, "/v1/contextualizedembeddings", inputs=[TEXTS])
    assert refused.status_code == 400 and refused.json()["detail"].startswith("model")


def of_rows(found: Any, reference: M3Reference) -> None:
    """Compare KServe's tensors of ``TEXTS`` with the definitions; behind the end of a row is padding."""
    indices, values = found("sparse_indices"), found("sparse_values")
    vectors, lengths = found("multivector"), found("multivector_lengths")
    assert indices.dtype == lengths.dtype == np.int32 and values.dtype == vectors.dtype == np.float32
    assert vectors.shape[1] == lengths.max()
    for row, text in enumerate(TEXTS):
        tokens = reference.tokens(text)
        weights = reference.weights(tokens)
        count = len(weights)
        assert indices[row].tolist() == [*weights, *[-1] * (indices.shape[1] - count)]
        np.testing.assert_allclose(values[row, :count], list(weights.values()), atol=1e-5)
        np.testing.assert_allclose(vectors[row, : lengths[row]], reference.vectors(tokens), atol=1e-5)
        assert not values[row, count:].any() and not vectors[row, lengths[row] :].any()


NAMES = ("sparse_values", "sparse_indices", "multivector", "multivector_lengths")


@pytest.mark.kserve
def test_kserve_lists_the_tensors_of_all_outputs(kserve: KserveClient) -> None:
    options = {"as_json": True} if kserve.module.__name__.endswith("grpc") else {}
    metadata = kserve.client.get_model_metadata(MODEL, **options)
    assert [each["name"] for each in metadata["outputs"]] == [
        "embeddings",
        "sparse_indices",
        "sparse_values",
        "multivector",
        "multivector_lengths",
        "token_count",
    ]


@pytest.mark.kserve
def test_kserve_gives_the_tensors_that_are_asked_for(kserve: KserveClient, reference: M3Reference) -> None:
    texts = {"text": np.array(TEXTS, object)}
    asked = [kserve.module.InferRequestedOutput(name) for name in ("embeddings", *NAMES)]
    found = kserve.infer(MODEL, texts, outputs=asked)
    dense = found.as_numpy("embeddings")
    for row, text in enumerate(TEXTS):
        np.testing.assert_allclose(dense[row], reference.dense(reference.tokens(text)), atol=1e-5)
    of_rows(found.as_numpy, reference)
    plain = kserve.infer(MODEL, texts)
    np.testing.assert_allclose(plain.as_numpy("embeddings"), dense, atol=1e-6)
    assert [plain.as_numpy(name) for name in NAMES] == [None] * 4
    only = kserve.infer(MODEL, texts, outputs=[kserve.module.InferRequestedOutput("sparse_indices")])
    assert np.array_equal(only.as_numpy("sparse_indices"), found.as_numpy("sparse_indices"))
    assert only.as_numpy("embeddings") is None


@pytest.mark.kserve
def test_kserve_takes_token_ids_with_empty_rows(kserve: KserveClient, reference: M3Reference) -> None:
    rows = [reference.tokens(text) for text in TEXTS]
    ids = np.zeros((5, max(map(len, rows)) + 1), np.int64)
    mask = np.zeros_like(ids)
    for place, row in zip((0, 2, 4), rows, strict=True):
        ids[place, : len(row)], mask[place, : len(row)] = row, 1
    asked = [kserve.module.InferRequestedOutput(name) for name in ("pooled", *NAMES)]
    found = kserve.infer("router", {"input_ids": ids, "attention_mask": mask}, outputs=asked)
    of_rows(lambda name: found.as_numpy(name)[::2], reference)
    assert (found.as_numpy("sparse_indices")[1::2] == -1).all()
    assert not found.as_numpy("multivector_lengths")[1::2].any() and not found.as_numpy("pooled")[1::2].any()
    nothing = kserve.infer("router", {"input_ids": ids[:1], "attention_mask": 0 * mask[:1]}, outputs=asked)
    assert nothing.as_numpy("pooled").shape == (1, 128)
    assert nothing.as_numpy("multivector_lengths").tolist() == [0]


@pytest.mark.kserve
def test_kserve_writes_named_tensors_into_shared_memory(kserve: KserveClient) -> None:
    texts = {"text": np.array(TEXTS, object)}
    names = [kserve.module.InferRequestedOutput(name) for name in NAMES[:2]]
    exact = kserve.infer(MODEL, texts, outputs=names)
    wanted = {name: exact.as_numpy(name) for name in NAMES[:2]}
    handles, asked = {}, []
    try:
        for name, values in wanted.items():
            key = f"/{PREFIX}{name}"
            handles[name] = shared_memory.create_shared_memory_region(name, key, values.nbytes)
            kserve.client.register_system_shared_memory(name, key, values.nbytes)
            asked.append(kserve.module.InferRequestedOutput(name))
            asked[-1].set_shared_memory(name, values.nbytes)
        kserve.infer(MODEL, texts, outputs=asked)
        for name, values in wanted.items():
            found = shared_memory.get_contents_as_numpy(handles[name], values.dtype, values.shape)
            np.testing.assert_allclose(found, values, atol=1e-6)
    finally:
        kserve.client.unregister_system_shared_memory()
        for handle in handles.values():
            shared_memory.destroy_shared_memory_region(handle)


def test_qdrant_searches_named_sparse_and_dense_vectors(service: Service) -> None:
    models = pytest.importorskip("qdrant_client.models")
    from qdrant_client import QdrantClient

    def points(texts: list[str]) -> list[dict[str, Any]]:
        rows = post(service, input=texts, output_types=["dense", "sparse"]).json()["data"]
        return [
            {"dense": row["embedding"], "sparse": models.SparseVector(**row["sparse_embedding"])}
            for row in rows
        ]

    client = QdrantClient(":memory:")
    client.create_collection(
        "texts",
        vectors_config={"dense": models.VectorParams(size=128, distance=models.Distance.COSINE)},
        sparse_vectors_config={"sparse": models.SparseVectorParams()},
    )
    stored = [
        models.PointStruct(id=place, vector=vector, payload={"text": text})
        for place, (text, vector) in enumerate(zip(TEXTS, points(TEXTS), strict=True))
    ]
    client.upsert("texts", stored)
    for place, asked in enumerate(points(TEXTS)):
        found = client.query_points(
            "texts",
            prefetch=[
                models.Prefetch(query=asked["dense"], using="dense", limit=3),
                models.Prefetch(query=asked["sparse"], using="sparse", limit=3),
            ],
            query=models.FusionQuery(fusion=models.Fusion.RRF),
        ).points
        assert found[0].id == place
    client.close()


@pytest.mark.installs
def test_fastembeds_sparse_form_is_made_of_an_answer(service: Service, reference: M3Reference) -> None:
    ran = subprocess.run(
        [
            str(clients_environment("fastembed") / "bin" / "python"),
            str(ROOT / "tests" / "clients" / "fastembed.py"),
            service.url,
            MODEL,
            json.dumps(TEXTS),
        ],
        # Not the folder of the program, which is called as the package is.
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    for number, (text, (weights, best)) in enumerate(zip(TEXTS, json.loads(ran.stdout), strict=True)):
        expected = reference.weights(reference.tokens(text))
        assert list(map(int, weights)) == list(expected) and best == number
        np.testing.assert_allclose(list(weights.values()), list(expected.values()), atol=1e-5)
