"""Triton's own clients, over HTTP and gRPC, against a running service."""

from __future__ import annotations

import asyncio
import queue
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pybase64
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException, shared_memory

from tests.e2e.disaggregated import Disaggregated
from tests.e2e.kserve import Door, KserveClient, kserve_frontend, refused
from tests.e2e.service import MODEL
from tests.waiting import wait_until

pytestmark = [pytest.mark.service, pytest.mark.kserve, pytest.mark.xdist_group("shared-service")]

TEXTS = ["a yellow heart", "x", "two cats asleep on a pink sofa"]
PREFIX = "tessera-test-"


@pytest.fixture(scope="module")
def door(service: Disaggregated) -> Iterator[Door]:
    with kserve_frontend(service, "--kserve-shared-memory", PREFIX) as door:
        yield door


@pytest.fixture(params=["grpc", "http"])
def kserve(request: pytest.FixtureRequest, door: Door) -> Iterator[KserveClient]:
    client = door.client(request.param)
    yield client
    client.close()


def tokens(door: Door, text: str) -> list[int]:
    answer = httpx.post(f"http://{door.http}/tokenize", json={"model": MODEL, "prompt": text})
    return answer.raise_for_status().json()["tokens"]


def wanted(service: Disaggregated, *inputs: Any, **options: Any) -> np.ndarray:
    return np.array(service.embed(*inputs, **options), np.float32)


def padded(door: Door, texts: list[str], length: int, *, left: bool = False) -> tuple[np.ndarray, np.ndarray]:
    ids, mask = np.zeros((len(texts), length), np.int64), np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        found = tokens(door, text)
        place = slice(length - len(found), None) if left else slice(0, len(found))
        ids[row, place], mask[row, place] = found, 1
    return ids, mask


def refusal(kserve: KserveClient, *arguments: Any, **options: Any) -> tuple[int, str]:
    with pytest.raises(InferenceServerException) as caught:
        kserve.infer(*arguments, **options)
    return refused(caught.value)


def test_the_server_says_what_it_has(kserve: KserveClient) -> None:
    client = kserve.client
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("router")
    as_json = {"as_json": True} if kserve.module is tritonclient.grpc else {}
    assert client.get_server_metadata(**as_json)["name"] == "tessera"
    found = client.get_model_metadata("router", **as_json)
    assert [one["name"] for one in found["inputs"]] == ["input_ids", "attention_mask", "pixel_values"][
        : len(found["inputs"])
    ]
    assert [one["name"] for one in found["outputs"]] == ["pooled"]
    config = client.get_model_config("router", **as_json)
    config = config.get("config", config)
    assert config["max_batch_size"] > 30
    optional = {one["name"] for one in config["input"] if one.get("optional")}
    assert "attention_mask" in optional
    assert "input_ids" not in optional
    index = client.get_model_repository_index(**as_json)
    names = {one["name"] for one in (index["models"] if as_json else index)}
    assert {"router", MODEL.replace("-", "_")} <= names


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("kind", [np.int64, np.int32])
def test_padded_rows_are_the_vectors_of_their_tokens(
    service: Disaggregated, door: Door, kserve: KserveClient, left: bool, kind: type
) -> None:
    ids, mask = padded(door, TEXTS, 40, left=left)
    answer = kserve.infer("router", {"input_ids": ids.astype(kind), "attention_mask": mask.astype(kind)})
    pooled = answer.as_numpy("pooled")
    assert pooled.dtype == np.float32
    assert np.allclose(pooled, wanted(service, *TEXTS), atol=1e-6)


def test_an_empty_row_is_zeros_and_its_neighbours_are_not(
    service: Disaggregated, door: Door, kserve: KserveClient
) -> None:
    ids, mask = padded(door, TEXTS, 40)
    mask[1] = 0
    pooled = kserve.infer("router", {"input_ids": ids, "attention_mask": mask}).as_numpy("pooled")
    assert not pooled[1].any()
    assert np.allclose(pooled[[0, 2]], wanted(service, TEXTS[0], TEXTS[2]), atol=1e-6)
    zeros = np.zeros((2, 16), np.int64)
    assert not kserve.infer("router", {"input_ids": zeros, "attention_mask": zeros}).as_numpy("pooled").any()


def test_one_model_has_several_names(kserve: KserveClient) -> None:
    ids = np.array([[1, 5, 6]])
    found = [
        kserve.infer(name, {"input_ids": ids}).as_numpy("pooled") for name in ("router", "fused", "model_1")
    ]
    assert np.allclose(found, found[0], atol=1e-6)


def test_texts_and_images_come_as_bytes(
    service: Disaggregated, kserve: KserveClient, photos: dict[str, bytes]
) -> None:
    texts = [[text.encode()] for text in TEXTS]
    answer = kserve.infer(MODEL, {"text": texts}, parameters={"input_type": "passage"})
    assert np.allclose(
        answer.as_numpy("embeddings"), wanted(service, *TEXTS, input_type="passage"), atol=1e-6
    )
    assert answer.as_numpy("token_count").tolist() > [0, 0, 0]
    # As NVIDIA's own client writes the name, and in its default role.
    answer = kserve.infer("Tessera_Random", {"text": texts[:1]})
    assert np.allclose(
        answer.as_numpy("embeddings"), wanted(service, TEXTS[0], input_type="query"), atol=1e-6
    )
    answer = kserve.infer(MODEL, {"image": [[photos["china"]]]})
    url = "data:image/jpeg;base64," + pybase64.b64encode_as_string(photos["china"])
    assert np.allclose(answer.as_numpy("embeddings"), wanted(service, url), atol=1e-6)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_outputs_may_be_rounded(kserve: KserveClient, datatype: str) -> None:
    ids = {"input_ids": np.array([[1, 5, 6]])}
    exact = kserve.infer("router", ids).as_numpy("pooled")
    answer = kserve.infer("router", ids, parameters={"datatype": datatype})
    rounded = answer.as_numpy("pooled")
    assert rounded.dtype.itemsize == 2
    assert np.allclose(rounded.astype(np.float32), exact, atol=0.004)


def test_vectors_may_be_cut_and_left_as_long_as_they_are(kserve: KserveClient) -> None:
    ids = {"input_ids": np.array([[1, 5, 6]])}
    whole = kserve.infer("router", ids).as_numpy("pooled")
    cut = kserve.infer("router", ids, parameters={"dimensions": 32}).as_numpy("pooled")
    assert np.allclose(cut, whole[:, :32] / np.linalg.norm(whole[:, :32]), atol=1e-6)
    raw = kserve.infer("router", ids, parameters={"normalize": False}).as_numpy("pooled")
    assert np.allclose(raw / np.linalg.norm(raw), whole, atol=1e-5)
    assert abs(np.linalg.norm(raw) - 1) > 1e-3


def test_the_answer_has_the_clients_id(kserve: KserveClient) -> None:
    answer = kserve.infer("router", {"input_ids": np.array([[1, 5]])}, request_id="mine")
    said = answer.get_response()
    assert (said["id"] if isinstance(said, dict) else said.id) == "mine"


@pytest.mark.parametrize(
    ("inputs", "options", "status", "says"),
    [
        ({}, {}, 400, "input_ids"),
        ({"input_ids": np.zeros((1, 4), np.float32)}, {}, 400, "input_ids: expected INT64"),
        ({"input_ids": np.zeros(4, np.int64)}, {}, 400, "input_ids: expected the shape"),
        ({"input_ids": np.full((1, 4), 1 << 40)}, {}, 400, "input_ids[0]"),
        ({"input_ids": np.zeros((300, 1), np.int64)}, {}, 400, "1 to 256 rows"),
        ({"input_ids": np.zeros((0, 4), np.int64)}, {}, 400, "rows, found 0"),
        (
            {"input_ids": np.zeros((1, 4), np.int64), "attention_mask": np.zeros((1, 3), np.int64)},
            {},
            400,
            "attention_mask: expected the shape",
        ),
        (
            {"input_ids": np.zeros((1, 4), np.int64), "attention_mask": np.array([[1, 0, 1, 0]])},
            {},
            400,
            "attention_mask[0]: expected ones in one run",
        ),
        (
            {"input_ids": np.zeros((1, 4), np.int64), "attention_mask": np.array([[1, 2, 1, 0]])},
            {},
            400,
            "attention_mask[0]: expected 0 or 1",
        ),
        ({"input_ids": np.zeros((1, 4), np.int64), "other": np.zeros(1)}, {}, 400, "other"),
        ({"input_ids": np.ones((1, 4), np.int64)}, {"parameters": {"colour": 1}}, 400, "colour"),
        ({"input_ids": np.ones((1, 4), np.int64)}, {"parameters": {"dimensions": 5}}, 400, "dimensions"),
        ({"input_ids": np.ones((1, 4), np.int64)}, {"model_version": "7"}, 404, "version 1"),
        ({"input_ids": np.ones((1, 40_000), np.int64)}, {}, 400, "input_ids[0]"),
    ],
)
def test_an_error_names_the_tensor(
    kserve: KserveClient, inputs: dict[str, Any], options: dict[str, Any], status: int, says: str
) -> None:
    if "other" in inputs:
        inputs = {**inputs, "other": inputs["other"].astype(np.float32)}
    found, message = refusal(kserve, "router", inputs, **options)
    assert (found, says in message) == (status, True), message


def test_unknown_models_outputs_and_operations(kserve: KserveClient) -> None:
    ids = {"input_ids": np.array([[1, 5]])}
    assert refusal(kserve, "nobodys", ids)[0] == 404
    output = kserve.module.InferRequestedOutput("last_hidden")
    status, message = refusal(kserve, "router", ids, outputs=[output])
    assert (status, "last_hidden" in message) == (400, True)
    for operation in (kserve.client.load_model, kserve.client.unload_model):
        with pytest.raises(InferenceServerException) as caught:
            operation("router")
        assert refused(caught.value)[0] == 501


def test_statistics_count_what_was_answered(kserve: KserveClient) -> None:
    def counted() -> dict[str, Any]:
        as_json = {"as_json": True} if kserve.module is tritonclient.grpc else {}
        (one,) = kserve.client.get_inference_statistics("router", **as_json)["model_stats"]
        return {
            "calls": int(one["inference_stats"]["success"].get("count", 0)),
            "queue": int(one["inference_stats"]["queue"].get("count", 0)),
            "rows": int(one.get("inference_count", 0)),
            "failed": int(one["inference_stats"]["fail"].get("count", 0)),
        }

    before = counted()
    kserve.infer("router", {"input_ids": np.array([[1, 5], [1, 6]])})
    refusal(kserve, "router", {})
    after = counted()
    assert {name: after[name] - before[name] for name in after} == {
        "calls": 1,
        "queue": 1,
        "rows": 2,
        "failed": 1,
    }


def test_a_deadline_is_the_clients(door: Door) -> None:
    with tritonclient.grpc.InferenceServerClient(door.grpc) as client:
        tensor = tritonclient.grpc.InferInput("input_ids", [1, 2], "INT64")
        tensor.set_data_from_numpy(np.array([[1, 5]]))
        with pytest.raises(InferenceServerException) as caught:
            client.infer("router", [tensor], client_timeout=1e-6)
        assert refused(caught.value)[0] == 504
        with pytest.raises(InferenceServerException) as caught:
            client.infer("router", [tensor], timeout=1)
        assert refused(caught.value)[0] == 504


def test_a_stream_answers_in_order_and_one_error_is_alone(door: Door) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(door.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(20):
            ids = np.array([[1, 5 + number]]) if number != 7 else np.array([[-1, 5]])
            tensor = tritonclient.grpc.InferInput("input_ids", [1, 2], "INT64")
            tensor.set_data_from_numpy(ids)
            client.async_stream_infer(
                "router", [tensor], request_id=str(number), enable_empty_final_response=True
            )
        found = [answers.get(timeout=60) for _ in range(20)]
        client.stop_stream()
    for number, (result, error) in enumerate(found):
        if number == 7:
            assert "input_ids[0]" in str(error)
        else:
            assert error is None
            assert result.get_response().id == str(number)
            assert result.get_response().parameters["triton_final_response"].bool_param


async def test_asynchronous_clients(door: Door) -> None:
    found = []
    for module, address in ((tritonclient.grpc, door.grpc), (tritonclient.http, door.http)):
        async with module.aio.InferenceServerClient(address) as client:
            tensor = module.InferInput("input_ids", [1, 2], "INT64")
            tensor.set_data_from_numpy(np.array([[1, 5]]))
            answers = await asyncio.gather(*(client.infer("router", [tensor]) for _ in range(20)))
            found += [answer.as_numpy("pooled") for answer in answers]
    assert len(found) == 40
    assert all(np.allclose(one, found[0], atol=1e-6) for one in found)


def test_json_without_binary_data(service: Disaggregated, door: Door) -> None:
    body = {
        "id": "7",
        "inputs": [
            {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [[1, 5, 6]]},
            {"name": "attention_mask", "shape": [1, 3], "datatype": "BOOL", "data": [True, True, False]},
        ],
    }
    answer = httpx.post(f"http://{door.http}/v2/models/router/versions/1/infer", json=body).raise_for_status()
    (output,) = answer.json()["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("pooled", "FP32", [1, 128])
    assert np.allclose(output["data"], wanted(service, [1, 5])[0], atol=1e-6)
    assert answer.json()["id"] == "7"
    body["parameters"] = {"datatype": "FP16"}
    refused_ = httpx.post(f"http://{door.http}/v2/models/router/infer", json=body)
    assert (refused_.status_code, "binary_data" in refused_.json()["error"]) == (400, True)


def test_tensors_in_shared_memory(door: Door, kserve: KserveClient) -> None:
    ids = np.array([[1, 5, 6], [1, 7, 0]])
    exact = kserve.infer("router", {"input_ids": ids}).as_numpy("pooled")
    handles = [
        shared_memory.create_shared_memory_region(name, f"/{PREFIX}{name}", size)
        for name, size in (("in", ids.nbytes), ("out", exact.nbytes))
    ]
    try:
        shared_memory.set_shared_memory_region(handles[0], [ids])
        for name, size in (("in", ids.nbytes), ("out", exact.nbytes)):
            kserve.client.register_system_shared_memory(name, f"/{PREFIX}{name}", size)
        given = kserve.module.InferInput("input_ids", list(ids.shape), "INT64")
        given.set_shared_memory("in", ids.nbytes)
        asked = kserve.module.InferRequestedOutput("pooled")
        asked.set_shared_memory("out", exact.nbytes)
        kserve.client.infer("router", [given], outputs=[asked])
        found = shared_memory.get_contents_as_numpy(handles[1], np.float32, exact.shape)
        assert np.allclose(found, exact, atol=1e-6)
        # A client that shortens its file harms nobody.
        Path(f"/dev/shm/{PREFIX}in").write_bytes(b"")
        with pytest.raises(InferenceServerException) as caught:
            kserve.client.infer("router", [given])
        assert refused(caught.value)[0] == 400
        asked.set_shared_memory("out", exact.nbytes + 1)
        with pytest.raises(InferenceServerException) as caught:
            kserve.client.infer("router", [kserve.tensor("input_ids", ids)], outputs=[asked])
        assert refused(caught.value)[0] == 400
    finally:
        kserve.client.unregister_system_shared_memory()
        for handle in handles:
            shared_memory.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("key", ["/someone-elses", f"/../{PREFIX}x", f"/{PREFIX}nowhere", f"/{PREFIX}/../x"])
def test_other_files_are_no_regions(kserve: KserveClient, key: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        kserve.client.register_system_shared_memory("x", key, 8)
    assert refused(caught.value)[0] == 400


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_keys_rates_and_switched_off_shared_memory(
    service: Disaggregated, tmp_path: Path, transport: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-kserve-0123456789 kserve\n")
    flags = ("--api-keys-file", str(keys), "--requests-per-minute", "3")
    with kserve_frontend(service, *flags) as door:
        client = door.client(transport)
        try:
            ids = {"input_ids": np.array([[1, 5]])}
            assert client.client.is_server_live()
            assert refusal(client, "router", ids)[0] == 401
            assert refusal(client, "router", ids, headers={"authorization": "Bearer wrong"})[0] == 401
            mine = {"authorization": "Bearer sk-kserve-0123456789"}
            for _ in range(3):
                client.infer("router", ids, headers=dict(mine))
            assert refusal(client, "router", ids, headers=dict(mine))[0] == 429
            with pytest.raises(InferenceServerException) as caught:
                client.client.register_system_shared_memory("x", "/x", 8, headers=dict(mine))
            assert refused(caught.value)[0] in (429, 501)
            metrics = httpx.get(f"http://{door.http}/metrics", headers=dict(mine)).text
            assert 'tessera_errors_total{code="rate_limited"' in metrics
        finally:
            client.close()


@pytest.fixture(scope="module")
def narrow(service: Disaggregated) -> Iterator[Door]:
    """A frontend with two places, and time to look at it."""
    with kserve_frontend(service, "--max-in-flight", "2", "--request-timeout-seconds", "300") as door:
        yield door


@contextmanager
def places_held(door: Door) -> Iterator[None]:
    """Hold both places by requests whose bodies do not end, until the context does."""
    host, _, port = door.http.partition(":")
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {door.http}\r\nContent-Type: application/json\r\n"
    wait_until(lambda: in_flight(door) == 0)
    with ExitStack() as held:
        for _ in range(2):
            sender = held.enter_context(socket.create_connection((host, int(port))))
            sender.sendall(f"{head}Content-Length: 64\r\n\r\n{{".encode())
        wait_until(lambda: in_flight(door) == 2)
        yield


def in_flight(door: Door) -> int:
    metrics = httpx.get(f"http://{door.http}/metrics", timeout=100).text
    (value,) = re.findall(r"^tessera_requests_in_flight (\S+)$", metrics, re.MULTILINE)
    return int(float(value))


def embed(door: Door) -> httpx.Response:
    return httpx.post(f"http://{door.http}/v1/embeddings", json={"model": MODEL, "input": "x"}, timeout=100)


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_calls_wait_where_others_are_refused(narrow: Door, transport: str) -> None:
    ids = np.array([[1, 5, 6]])

    def ask(**options: Any) -> np.ndarray:
        # A client of each thread's own.
        kserve = narrow.client(transport)
        try:
            pooled: np.ndarray = kserve.infer("router", {"input_ids": ids}, **options).as_numpy("pooled")
            return pooled
        finally:
            kserve.close()

    exact = ask()
    with ThreadPoolExecutor(8) as threads:
        with places_held(narrow):
            waiting = [threads.submit(ask) for _ in range(8)]
            # Another door has no line: it refuses, whenever it is asked.
            refusals = [embed(narrow) for _ in range(4)]
            assert [answer.status_code for answer in refusals] == [429] * 4
            assert all("full" in answer.json()["error"]["message"] for answer in refusals)
            # A call whose own time ends in the line is refused, and the others still wait.
            with pytest.raises(InferenceServerException) as caught:
                ask(timeout=1_000_000)
            assert refused(caught.value)[0] == 504
            assert not any(call.done() for call in waiting)
        # With room each of them is answered.
        for call in waiting:
            np.testing.assert_allclose(call.result(timeout=200), exact, atol=1e-6)
    wait_until(lambda: in_flight(narrow) == 0)
    assert embed(narrow).status_code == 200
