"""Rows that are no numbers, or not of length 1, fail the inputs that they are of, by every route."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from tritonclient.utils import InferenceServerException

from tessera_tools.random_checkpoint.checkpoint import main as write_checkpoint
from tests.e2e.inputs import cosine, parts
from tests.e2e.kserve import Door, KserveClient, refused
from tests.e2e.service import MODEL, Service, free_ports, launch
from tests.families.dual_encoder import HIDDEN, install, reference
from tests.families.unsound import LARGE, NOT_A_NUMBER, TOO_LONG, ZERO

pytestmark = [pytest.mark.service, pytest.mark.usefixtures("forks")]

SEED = 5
BAD = pytest.mark.parametrize(
    "bad", [f"a {NOT_A_NUMBER}", f"a {TOO_LONG}", ZERO], ids=["nan", "long", "zero"]
)


@dataclass(frozen=True, slots=True)
class Unsound:
    service: Service
    door: Door
    checkpoint: Path
    path: str
    """A ``PYTHONPATH`` that finds the family."""

    def post(self, route: str, **body: object) -> httpx.Response:
        return httpx.post(f"{self.service.url}{route}", json={"model": MODEL, **body}, timeout=60)


@pytest.fixture(scope="module")
def unsound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unsound]:
    folder = tmp_path_factory.mktemp("rows")
    path = install(folder / "site", "tests.families.unsound")
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "test_unsound", "seed": SEED}))
    (port,) = free_ports(1)
    environment = {"PYTHONPATH": path, "TESSERA_FRONTEND_ARGS": f"--grpc-port {port} --result-cache-mb 8"}
    cache = ("--multimodal-embedding-cache-capacity-gb", "0.01")
    with launch(
        "e_p.sh", checkpoint, folder / "log", workers=2, arguments=cache, environment=environment
    ) as running:
        yield Unsound(
            running, Door(running.url.removeprefix("http://"), f"127.0.0.1:{port}"), checkpoint, path
        )


def png(colour: tuple[int, int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 40), colour).save(buffer, "PNG")
    return buffer.getvalue()


GOOD_IMAGE, BAD_IMAGE = png((0, 90, 200)), png((255, 0, 0))


def right(embedding: Any, text: str, *images: bytes) -> bool:
    return cosine(np.array(embedding, np.float32), reference(SEED, text, images)) > 0.9999


def failed(error: dict[str, Any], param: str) -> bool:
    return (error["code"], error["param"]) == ("engine_failed", param) and param in error["message"]


@BAD
def test_a_partial_answer_keeps_the_good_inputs(unsound: Unsound, bad: str) -> None:
    for _ in range(2):
        answer = unsound.post("/v1/embeddings", input=["hello", bad, "world"], partial=True)
        assert answer.status_code == 200
        first, second, third = answer.json()["data"]
        assert right(first["embedding"], "hello") and right(third["embedding"], "world")
        assert second["embedding"] is None and failed(second["error"], "input[1]")


@BAD
def test_an_error_names_its_input(unsound: Unsound, bad: str) -> None:
    # At another place than in the request that has it in its flight or cache.
    for place in (2, 0):
        texts = ["one", "two", "three"]
        texts[place] = bad
        answer = unsound.post("/v1/embeddings", input=texts)
        assert answer.status_code == 500 and failed(answer.json()["error"], f"input[{place}]")
    answer = unsound.post("/pooling", input=["one", bad])
    assert answer.status_code == 500 and failed(answer.json()["error"], "input[1]")


@BAD
def test_a_score_names_its_document(unsound: Unsound, bad: str) -> None:
    answer = unsound.post("/v1/rerank", query="a", documents=["one", "two", bad])
    assert answer.status_code == 500 and failed(answer.json()["error"], "documents[2]")
    answer = unsound.post("/v1/rerank", query=bad, documents=["one"])
    assert answer.status_code == 500 and failed(answer.json()["error"], "query")


def test_an_image_fails_the_inputs_that_have_it(unsound: Unsound) -> None:
    inputs = [parts("a", GOOD_IMAGE), parts("b", BAD_IMAGE), "c", parts("d", GOOD_IMAGE, BAD_IMAGE)]
    for _ in range(2):
        answer = unsound.post("/v1/embeddings", input=inputs, partial=True)
        assert answer.status_code == 200
        data = answer.json()["data"]
        assert right(data[0]["embedding"], "a", GOOD_IMAGE) and right(data[2]["embedding"], "c")
        for place in (1, 3):
            assert data[place]["embedding"] is None and failed(data[place]["error"], f"input[{place}]")
    # Of the two images one is kept.
    assert unsound.service.worker_metric(1, "tessera_embedding_cache_entries") == 1
    assert "vision rows are not kept, they are not finite" in unsound.service.log.read_text()


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_kserve_names_the_row(unsound: Unsound, transport: str) -> None:
    client = unsound.door.client(transport)
    with pytest.raises(InferenceServerException) as caught:
        client.infer("router", {"input_ids": np.array([[5, 6], [5, 1], [7, 8]])})
    status, message = refused(caught.value)
    assert status == 500 and "input_ids[1]" in message, (status, message)
    with pytest.raises(InferenceServerException) as caught:
        client.infer(MODEL, {"text": [["good"], [f"bad {TOO_LONG}"]]})
    status, message = refused(caught.value)
    assert status == 500 and "text[1]" in message, (status, message)
    client.close()


@pytest.mark.parametrize("encoding", ["float", "base64", "bytes"])
def test_a_value_beyond_the_element_type_is_refused(unsound: Unsound, encoding: str) -> None:
    body = {"input": ["a", LARGE], "embed_dtype": "float16", "encoding_format": encoding}
    assert unsound.post("/v1/embeddings", **body).status_code == 200
    answer = unsound.post("/v1/embeddings", **body, normalize=False)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "embed_dtype"
    wide = unsound.post("/v1/embeddings", **{**body, "embed_dtype": "bfloat16"}, normalize=False)
    assert wide.status_code == 200


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_kserve_refuses_a_value_beyond_the_datatype(unsound: Unsound, transport: str) -> None:
    client: KserveClient = unsound.door.client(transport)
    inputs = {"input_ids": np.array([[ord(LARGE)] * 2])}
    found = client.infer("router", inputs, parameters={"datatype": "FP16"})
    assert found.as_numpy("pooled").shape == (1, HIDDEN)
    with pytest.raises(InferenceServerException) as caught:
        client.infer("router", inputs, parameters={"datatype": "FP16", "normalize": False})
    status, message = refused(caught.value)
    assert status == 400 and "pooled" in message and "FP16" in message
    client.close()


def test_a_corpus_lists_the_item(unsound: Unsound, tmp_path: Path) -> None:
    source, out = tmp_path / "items.jsonl", tmp_path / "out"
    texts = ["hello", f"a {NOT_A_NUMBER}", "world", f"a {TOO_LONG}"]
    source.write_text(
        "".join(json.dumps({"id": str(index), "text": text}) + "\n" for index, text in enumerate(texts))
    )
    words = ["embed", str(source), "--out", str(out), "--model-path", str(unsound.checkpoint)]
    ended = subprocess.run(
        [sys.executable, "-m", "tessera.cli", *words],
        env=os.environ | {"PYTHONPATH": unsound.path},
        capture_output=True,
        text=True,
        timeout=180,
    )
    errors = pq.read_table(out / "errors.parquet").to_pylist()
    assert [row["id"] for row in errors] == ["1", "3"], ended.stderr
    assert all("engine_failed" in str(row) for row in errors)


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("qwen3_embedding", "model.norm.weight"),
        ("qwen3_vl_embedding", "model.visual.blocks.0.attn.proj.weight"),
    ],
    ids=["text", "vision"],
)
def test_a_worker_whose_weights_are_no_numbers_does_not_become_ready(
    family: str, tensor: str, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(["--out", str(checkpoint), "--family", family, "--size", "tiny"])
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor].view(-1)[-1] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    port, system = free_ports(1)[0], free_ports(1)[0]
    words = ["serve", str(checkpoint), "--port", str(port), "--system-port-base", str(system)]
    ended = subprocess.run(
        [sys.executable, "-m", "tessera.cli", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    assert ended.returncode
    lines = ended.stdout.splitlines()
    said = f"tensor {tensor!r} has values that are no numbers"
    assert sum(said in line for line in lines) == 1, ended.stdout
    assert "before the service was ready" in ended.stdout and "Traceback" not in ended.stdout
