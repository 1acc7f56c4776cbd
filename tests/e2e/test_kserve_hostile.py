"""KServe messages that no client sends: each is refused with what is wrong, and none is a failure of ours."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from tessera_kserve import messages_pb2 as pb
from tests.e2e.disaggregated import Disaggregated
from tests.e2e.kserve import Door, kserve_frontend
from tests.e2e.service import MODEL

pytestmark = [
    pytest.mark.service,
    pytest.mark.kserve,
    pytest.mark.fuzzes,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("shared-service"),
]

GRPC_MESSAGES = 6_000
HTTP_MESSAGES = 1_000
AT_ONCE = 16
METHOD = "/inference.GRPCInferenceService/"
NAMES = (
    "input_ids",
    "attention_mask",
    "pixel_values",
    "text",
    "image",
    "modality",
    "",
    "x",
    "ü" * 90,
    "a\0b",
)
TYPES = (
    "INT64",
    "INT32",
    "FP32",
    "FP16",
    "BF16",
    "BOOL",
    "BYTES",
    "UINT8",
    "",
    "INT63",
    "int64",
    "STRING",
    "FP8",
)
SIZES = (0, 1, 2, 3, 8, 255, 256, 257, 1 << 20, 1 << 31, 1 << 62, (1 << 63) - 1, -1, -(1 << 63))
MODELS = (
    "router",
    MODEL,
    "fused",
    "vit",
    "hidden_states",
    "nobodys",
    "",
    "router\0",
    "../router",
    "r" * 5000,
)
PARAMETERS = ("priority", "timeout", "dimensions", "normalize", "datatype", "input_type", "truncate")
OTHERS = (
    *("sequence_id", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"),
    *("binary_data_size", "binary_data", "classification", "triton_x", "colour", ""),
)
# What no message of a client may get: our own failures.
OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
TENSORS = {
    "INT64": lambda count: np.arange(count, dtype="<i8").tobytes(),
    "INT32": lambda count: np.ones(count, "<i4").tobytes(),
    "FP32": lambda count: np.full(count, np.nan, "<f4").tobytes(),
    "BOOL": lambda count: b"\1" * count,
    "BYTES": lambda count: b"\1\0\0\0x" * count,
}


@pytest.fixture(scope="module")
def door(service: Disaggregated) -> Iterator[Door]:
    with kserve_frontend(service, "--request-timeout-seconds", "20") as door:
        yield door


class Hostile:
    """``usual`` is how often a value is the one that a client would send."""

    def __init__(self, seed: int, usual: float = 0.7) -> None:
        self._random = random.Random(seed)
        self._usual = usual

    def often(self, usual: Any, others: Any) -> Any:
        return usual if self._random.random() < self._usual else self._random.choice(others)

    def parameter(self, given: Any) -> None:
        draw = self._random
        for _ in range(draw.choice((0, 0, 0, 1, 3))):
            one = given[draw.choice((*PARAMETERS, *OTHERS))]
            match draw.randrange(6):
                case 0:
                    one.bool_param = draw.random() < 0.5
                case 1:
                    one.int64_param = draw.choice((*SIZES[:-1], -5))
                case 2:
                    one.uint64_param = draw.choice(((1 << 64) - 1, 0, 7))
                case 3:
                    one.double_param = draw.choice((float("nan"), float("inf"), -1.5))
                case 4:
                    one.string_param = draw.choice(("", "query", "END", "FP16", "\0", "z" * 3000))

    def shape(self) -> list[int]:
        draw = self._random
        if draw.random() < 0.5:
            return [draw.choice((1, 2)), draw.choice((1, 3, 8))]
        return [draw.choice(SIZES) for _ in range(draw.choice((0, 1, 2, 3, 4, 9)))]

    def message(self) -> pb.ModelInferRequest:
        draw = self._random
        found = pb.ModelInferRequest(
            model_name=self.often(draw.choice(MODELS[:2]), MODELS),
            model_version=self.often("", ("1", "2", "-1", "x" * 500)),
            id=self.often("", ("x" * 5000, "\n")),
        )
        self.parameter(found.parameters)
        raw = draw.random() < 0.7
        for _ in range(self.often(1, (0, 2, 3, 12))):
            shape, datatype = self.shape(), self.often("INT64", TYPES)
            one = found.inputs.add(name=self.often("input_ids", NAMES), datatype=datatype, shape=shape)
            self.parameter(one.parameters)
            count = 1
            for size in shape:
                count *= size
            count = count if 0 <= count <= 4096 and draw.random() < 0.8 else draw.choice((0, 1, 7))
            if raw:
                made = TENSORS.get(datatype, lambda count: b"\xff" * count)(count)
                found.raw_input_contents.append(made if draw.random() < 0.8 else made[:-1])
            if not raw or draw.random() < 0.05:
                one.contents.int64_contents.extend([draw.choice((0, 1, 5, -1, 1 << 40))] * count)
                if draw.random() < 0.3:
                    one.contents.bytes_contents.append(b"\xff\xfe")
        for _ in range(self.often(0, (1, 2, 5))):
            self.parameter(found.outputs.add(name=self.often("pooled", NAMES)).parameters)
        if draw.random() < 0.05:
            found.raw_input_contents.append(b"")
        return found

    def bytes(self) -> bytes:
        draw = self._random
        if draw.random() < 0.1:
            return draw.randbytes(draw.choice((0, 1, 30, 3000)))
        written = bytearray(self.message().SerializeToString())
        if written and draw.random() < 0.3:
            for _ in range(draw.choice((1, 1, 5))):
                written[draw.randrange(len(written))] = draw.randrange(256)
        if draw.random() < 0.1:
            del written[draw.randrange(len(written) + 1) :]
        return bytes(written)

    def body(self) -> tuple[str, bytes, dict[str, str]]:
        """The path, body and headers of a request by HTTP."""
        draw = self._random
        value: Callable[[], Any] = lambda: draw.choice(  # noqa: E731
            (*SIZES, None, True, 1.5, "x", [], {}, [[1], [2, 3]], [1, 5], ["a"], {"a": []}, "query", 1 << 80)
        )

        def parameters() -> Any:
            return {
                draw.choice((*PARAMETERS, *OTHERS)): value() for _ in range(draw.choice((0, 0, 0, 0, 1, 4)))
            } or self.often({}, (value(),))

        tensors = [
            {
                "name": self.often("input_ids", (*NAMES, value())),
                "datatype": self.often("INT64", (*TYPES, value())),
                "shape": self.often([1, 2], (self.shape(), value(), [value()])),
                "data": self.often([1, 5], (value(), [value(), value()])),
                "parameters": parameters(),
            }
            for _ in range(self.often(1, (0, 2, 5)))
        ]
        body: Any = {
            "inputs": self.often(tensors, (value(),)),
            "parameters": parameters(),
            "outputs": self.often([], ([{"name": "pooled", "parameters": parameters()}], [value()], value())),
        }
        if draw.random() < 0.1:
            body[draw.choice(("id", "x", "inputs"))] = value()
        raw = json.dumps(self.often(body, (value(),))).encode()
        headers = {}
        if draw.random() < 0.3:
            raw += draw.randbytes(draw.choice((0, 1, 16)))
            said = self.often(str(len(raw)), ("0", "-1", "x", "1", str(1 << 70), str(len(raw) + 1)))
            headers["inference-header-content-length"] = said
        elif draw.random() < 0.1:
            raw = draw.randbytes(30)
        model = self.often(draw.choice(MODELS[:2]), ("fused", "nobodys", "%00", "..", "r" * 500))
        return f"/v2/models/{model}{self.often('', ('/versions/1', '/versions/x'))}/infer", raw, headers


async def test_no_message_by_grpc_makes_it_fail(door: Door) -> None:
    counts: Counter[grpc.StatusCode] = Counter()
    async with grpc.aio.insecure_channel(door.grpc) as channel:
        infer = channel.unary_unary(f"{METHOD}ModelInfer")
        hostile, left = Hostile(25), iter(range(GRPC_MESSAGES))

        async def ask() -> None:
            for _ in left:
                raw = hostile.bytes()
                try:
                    await infer(raw, timeout=60)
                    counts[grpc.StatusCode.OK] += 1
                except grpc.aio.AioRpcError as error:
                    assert error.code() not in OURS, (error.code(), error.details(), raw[:400])
                    counts[error.code()] += 1

        await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
        # The generator is worth something: some are good, most are not.
        assert counts[grpc.StatusCode.OK] > GRPC_MESSAGES / 200, counts
        assert counts[grpc.StatusCode.INVALID_ARGUMENT] > GRPC_MESSAGES / 2, counts
        for method in ("ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex", "ServerReady"):
            other = channel.unary_unary(METHOD + method)
            for _ in range(50):
                try:
                    await other(hostile.bytes(), timeout=60)
                except grpc.aio.AioRpcError as error:
                    assert error.code() not in OURS, (method, error.details())
        good = pb.ModelInferRequest(model_name="router", raw_input_contents=[np.array([[1, 5]]).tobytes()])
        good.inputs.add(name="input_ids", datatype="INT64", shape=[1, 2])
        answer = pb.ModelInferResponse.FromString(await infer(good.SerializeToString()))
        assert answer.outputs[0].name == "pooled"


async def test_no_message_by_http_makes_it_fail(door: Door) -> None:
    counts: Counter[int] = Counter()
    hostile, left = Hostile(7, usual=0.9), iter(range(HTTP_MESSAGES))
    async with httpx.AsyncClient(base_url=f"http://{door.http}", timeout=60) as client:

        async def ask() -> None:
            for _ in left:
                path, body, headers = hostile.body()
                answer = await client.post(path, content=body, headers=headers)
                assert answer.status_code in (200, 400, 404, 501, 504), (answer.text, path, body[:400])
                if answer.status_code != 200:
                    assert isinstance(answer.json()["error"], str | dict), answer.text
                counts[answer.status_code] += 1

        await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
    assert counts[200] > HTTP_MESSAGES / 100, counts
    assert counts[400] > HTTP_MESSAGES / 2, counts
